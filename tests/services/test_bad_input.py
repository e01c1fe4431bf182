"""What an operator may get wrong: each ends with a reason in the log's last line, and `baton doctor` names it too."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import ports
from support.processes.stack import MODEL, ROOT, RedisServer, wait_until

from baton.services import cli
from baton.services.certs.command import main as make_certs
from baton.services.certs.command import tls_flags

_LISTEN = ("--listen", "127.0.0.1:0")
_EDGE = ("--rest-listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Certificates of a fleet, and broken copies of the sample model."""
    made = tmp_path_factory.mktemp("bad")
    assert make_certs(["--dir", str(made / "certs"), "--fleet", "f"], {}) == 0
    for name in ("short", "no-tokenizer"):
        shutil.copytree(MODEL, made / name)
    weights = made / "short" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (made / "no-tokenizer" / "tokenizer.json").unlink()
    (made / "keys.toml").write_text("this is no key file")
    return made


def _ended(command, flags) -> tuple[int, str]:
    """Exit code and the log's last line of a service that cannot start."""
    words = [sys.executable, "-m", "baton.services.cli", command, *flags]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    lines = done.stderr.strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def _failures(command, flags, capsys) -> dict[str, tuple[str, str]]:
    """Returns the doctor's failures and their fixes, by topic."""
    capsys.readouterr()
    code = cli.main(["doctor", command, "--json", *flags], {})
    found = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["level"] == "failed"]
    assert (code == 1) is bool(found)
    return {one["topic"]: (one["what"], one["fix"]) for one in found}


@pytest.mark.parametrize(
    ("command", "flags", "topic", "word"),
    [
        ("gateway", ("--model", "/no/such/model", *_EDGE), "model", "/no/such/model"),
        ("worker", ("--model", "{}/short", *_LISTEN), "model", "model.safetensors"),
        ("worker", ("--host-cache-gb", "60000", "--model", str(MODEL), *_LISTEN), "limits", "--host-cache-gb=60000"),
        ("worker", ("--executor", "cuda", "--model", str(MODEL), *_LISTEN), "gpu", "GPU"),
        ("gateway", ("--model", "{}/no-tokenizer", *_EDGE), "model", "tokenizer.json"),
        ("gateway", ("--model", str(MODEL), "--limit-replicas", "0", *_EDGE), "settings", "--limit-replicas"),
        ("gateway", ("--model", str(MODEL), "--api-keys", "{}/keys.toml", *_EDGE), "keys", "keys.toml"),
        ("router", ("--workers", "w:1", *_LISTEN, "--tls-certificate", "{}/certs/none.crt"), "settings", "--tls-key"),
        ("kvstore", ("--redis-url", "redis:/6379", *_LISTEN), "settings", "--redis-url"),
    ],
)  # fmt: skip
def test_errors_are_named_by_the_last_line_and_by_the_doctor(folder, command, flags, topic, word, capsys):
    flags = tuple(flag.replace("{}", str(folder)) for flag in flags)
    code, last = _ended(command, flags)
    assert code in (1, 2)
    assert word in last
    found = _failures(command, flags, capsys)
    assert topic in found, found
    what, fix = found[topic]
    assert fix
    assert word in what or topic in ("limits", "gpu")


def test_another_services_certificate(folder, capsys):
    flags = ("--workers", "w:1", *_LISTEN, *tls_flags(str(folder / "certs"), "worker"))
    code, last = _ended("router", flags)
    assert code in (1, 2)
    assert "must be that of a router" in last
    what, fix = _failures("router", flags, capsys)["certificates"]
    assert "must be that of a router" in what
    assert "baton certs" in fix


def test_a_port_that_is_taken(capsys):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ("--listen", address)
        code, last = _ended("kvstore", (*flags, "--store", "memory"))
        assert code in (1, 2)
        assert address in last
        what, fix = _failures("kvstore", flags, capsys)["ports"]
        assert address in what
        assert "ss -ltnp" in fix


def test_a_wrong_password_of_redis_is_no_crash_loop(tmp_path, capsys):
    redis = RedisServer(tmp_path, ports.free_ports(1)[0])
    redis.start()
    try:
        flags = ("--redis-url", f"redis://:wrong-secret@127.0.0.1:{redis.port}/0", *_LISTEN)
        log = tmp_path / "kvstore.log"
        with log.open("wb") as out:
            words = [sys.executable, "-m", "baton.services.cli", "kvstore", *flags]
            process = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=out)
        try:
            # The index is served from memory meanwhile: the log says why nothing is kept.
            wait_until(lambda: "password" in log.read_text().lower(), "the log names the password", 60)
            assert process.poll() is None
            assert "wrong-secret" not in log.read_text()
        finally:
            process.kill()
            process.wait(30)
        what, fix = _failures("kvstore", flags, capsys)["redis"]
        assert "wrong-secret" not in what + fix
        assert "--redis-url" in fix
    finally:
        redis.stop()
