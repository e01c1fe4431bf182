"""`baton top` against a real gateway and router with scripted workers: as text, as JSON, on a screen."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.gateway.console_fleet import gateway_service, run_fleet, start_gateway
from support.network.tls_rig import make_certs
from support.processes import ports
from support.processes.stack import wait_until
from support.processes.terminal import Terminal

from baton.services import cli
from baton.services.top import command as top

NUM_WORKERS = 4


@dataclass(frozen=True)
class Rig:
    """Two gateways of one fleet."""

    open: str
    guarded: str
    keys: dict[str, str]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("top")
    keys = {scope: make_key(folder / "keys.toml", scope) for scope in ("admin", "inference")}
    with ExitStack() as cleanup:
        router = run_fleet(cleanup, NUM_WORKERS, placements_per_second=20.0)
        urls = [
            start_gateway(folder / f"gateway-{at}.log", router, flags, cleanup)
            for at, flags in enumerate(((), ("--api-keys", str(folder / "keys.toml"))))
        ]
        yield Rig(urls[0], urls[1], keys)


def make_key(path: Path, scope: str) -> str:
    words = [sys.executable, "-m", "baton.services.cli", "keys", "create", "--api-keys", str(path), "--scopes", scope]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def run_top(*words: str, environ: dict[str, str] | None = None) -> int:
    return cli.main(["top", *words], environ or {})


def test_where_there_is_no_terminal_one_snapshot_with_rates_is_printed(rig: Rig, capsys: pytest.CaptureFixture[str]):
    assert run_top(rig.open) == top.EXIT_OK
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].startswith(f"Workers {NUM_WORKERS} of {NUM_WORKERS} alive")
    assert "\x1b" not in printed
    assert all(len(line) <= 160 for line in lines)
    (decode,) = (line.split() for line in lines if line.startswith("decode-0 "))
    assert decode[1:3] == ["decode", "serving"]
    assert re.search(r"prefill-\d +decode-0 +[\d.]+ [MG]B/s", printed)
    assert re.search(r"req-\d+ +finished +.* ms +.* decode-", printed)
    assert "-1" not in lines[1]


def test_json_is_the_snapshot_that_the_console_gets(rig: Rig, capsys: pytest.CaptureFixture[str]):
    assert run_top("--json", "--url", rig.open) == top.EXIT_OK
    snapshot = json.loads(capsys.readouterr().out)
    assert {one["worker_id"] for one in snapshot["workers"]} == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert snapshot["window"] > 0
    assert snapshot["fleet"]["output_tokens_per_second"] > 0
    assert snapshot["flows"]
    assert all(one["placement_id"].isdigit() for one in snapshot["placements"])


def test_one_requests_times_and_evidence_are_shown(rig: Rig, capsys: pytest.CaptureFixture[str]):
    request_id = "req-00000003"
    assert run_top(rig.open, "--request", request_id) == top.EXIT_OK
    printed = capsys.readouterr().out
    for lane in ("place", "queue", "prefill", "decode"):
        assert re.search(rf"  {lane} +\|[ #]{{40}}\| +[\d.]+ m?s", printed), lane
    assert "Why here" in printed
    assert "What was known" in printed
    assert run_top(rig.open, "--request", request_id, "--json") == top.EXIT_OK
    assert json.loads(capsys.readouterr().out)["request_id"] == request_id
    assert run_top(rig.open, "--request", "nobody") == top.EXIT_FAILED
    assert "'nobody' is unknown, or too old" in capsys.readouterr().err


def test_without_a_key_of_the_scope_admin_the_missing_scope_is_reported(rig: Rig, capsys: pytest.CaptureFixture[str]):
    for words in ([], ["--api-key", rig.keys["inference"]], ["--api-key", "bt-wrong"]):
        assert run_top(rig.guarded, *words) == top.EXIT_FAILED
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "BATON_TOP_API_KEY" in printed.err
    assert run_top(rig.guarded, environ={"BATON_TOP_API_KEY": rig.keys["admin"]}) == top.EXIT_OK
    assert "decode-0" in capsys.readouterr().out


def test_a_missing_gateway_is_reported(capsys: pytest.CaptureFixture[str]):
    (port,) = ports.free_ports(1)
    assert run_top(f"http://127.0.0.1:{port}", "--json") == top.EXIT_FAILED
    assert "cannot be reached" in capsys.readouterr().err


def test_over_tls_it_needs_a_ca_and_a_gateway_without_its_router_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    certificates = make_certs(tmp_path / "certs")
    rest, rpc, nobody = (f"127.0.0.1:{port}" for port in ports.free_ports(3))
    own = ("--rest-tls-certificate", str(certificates / "edge.crt"), "--rest-tls-key", str(certificates / "edge.key"))
    with ExitStack() as cleanup:
        service = gateway_service(tmp_path / "gateway.log", rest, rpc, nobody, own)
        cleanup.callback(service.stop_by_force)
        service.spawn()
        wait_until(lambda: "listening" in service.log(), "the gateway listens", 60)
        ca = str(certificates / "ca.crt")
        assert run_top(f"https://{rest}", "--ca", ca) == top.EXIT_OK
        assert f"! No router has answered yet ({nobody}: UNAVAILABLE" in capsys.readouterr().out
        for words, problem in (([], "--ca names"), (["--ca", str(tmp_path / "nothing")], "No such file")):
            assert run_top(f"https://{rest}", *words) == top.EXIT_FAILED
            assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["127.0.0.1:8000"], ["ftp://x"], ["http://"], ["http://x:port"], ["--nonsense"], ["--once=perhaps"]]
)
def test_words_that_make_no_sense_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert run_top(*words) == top.EXIT_MISCONFIGURED
    assert "baton top: " in capsys.readouterr().err


def screen_of(url: str, term: str = "xterm") -> Terminal:
    return Terminal("top", url, environ={"TERM": term, "LINES": "30", "COLUMNS": "110"})


def test_on_a_screen_it_is_live_and_its_keys_work(rig: Rig):
    screen = screen_of(rig.open)
    try:
        screen.until("decode-0")
        screen.until("q quit")
        screen.press("\t")
        screen.until("TRANSFERS")
        screen.press("\t")
        screen.until("req-")
        screen.press("\n")
        screen.until("Why here")
        screen.press("\x1b")
        screen.until("PREFILL")
        screen.press("q")
        assert screen.end() == top.EXIT_OK
    finally:
        screen.close()


def test_a_refusal_ends_the_screen_and_a_terminal_that_cannot_gets_text(rig: Rig):
    refused = screen_of(rig.guarded)
    try:
        assert refused.end() == top.EXIT_FAILED
        assert refused.process.stderr is not None
        assert b"BATON_TOP_API_KEY" in refused.process.stderr.read()
    finally:
        refused.close()
    plain = screen_of(rig.open, term="no-such-terminal")
    try:
        plain.until("decode-0 ")
        assert plain.end() == top.EXIT_OK
        assert b"\x1b" not in plain.seen
    finally:
        plain.close()
