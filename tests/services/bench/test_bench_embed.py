"""`baton bench embed` against a gateway with scripted vectors: exact lengths, counted answers, clear errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.gateway.vectors_rig import FakePooler, both_servers

from baton.rpc.errors import NoCapacity
from baton.services.bench.embed import command as bench_embed
from baton.services.bench.sweep import command as sweep


async def bench(*flags: str) -> int:
    return await asyncio.to_thread(bench_embed.main, [*flags, "--warm-up", "1"])


@pytest.mark.parametrize("texts", ["words", "ids"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_texts_have_the_exact_lengths_and_are_counted(
    protocol: str, texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, pooler = tmp_path / "embed.json", FakePooler()
    async with both_servers(pooler, max_model_len=128) as (rest, address):
        server = ("--grpc", address) if protocol == "grpc" else ("--url", f"http://127.0.0.1:{rest.port}")
        load = ("--texts-per-request", "3", "--input-len", "20:40", "--num-requests", "8", "--concurrency", "2")
        ids = ("--token-ids",) if texts == "ids" else ()
        assert await bench(*server, *load, *ids, "--json", str(path)) == 0
    requests = pooler.requests[1:]
    assert [len(one.texts) for one in requests] == [3] * 8
    assert all(20 <= len(text) <= 40 for one in requests for text in one.texts)
    document = json.loads(path.read_text())
    assert (document["num_requests"], document["errors"], document["num_inexact_prompts"]) == (8, {}, 0)
    assert document["num_prompt_tokens"] == sum(len(text) for one in requests for text in one.texts)
    assert document["texts_per_second"] == pytest.approx(24 / document["seconds"])
    assert 0 < document["e2e"]["p50"] <= document["e2e"]["p99"]
    out = capsys.readouterr().out
    assert "8 of 8 requests" in out
    assert "texts/s" in out


async def test_texts_of_a_file_are_taken_in_turns(tmp_path: Path) -> None:
    path, pooler = tmp_path / "texts.jsonl", FakePooler()
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("fox", "a river", "ships")))
    async with both_servers(pooler) as (rest, _):
        url = f"http://127.0.0.1:{rest.port}"
        flags = ("--dataset-path", str(path), "--texts-per-request", "2", "--encoding-format", "float")
        assert await bench("--url", url, *flags, "--num-requests", "2", "--concurrency", "1") == 0
        encode = rest.catalog.get("").tokenizer.encode
        expected = [encode(text, add_special_tokens=True) for text in ("fox", "a river", "ships") * 2]
    assert [text for one in pooler.requests for text in one.texts] == expected


async def test_a_server_that_refuses_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    class Full(FakePooler):
        async def pool(self, request):  # type: ignore[no-untyped-def]
            if self.requests:
                raise NoCapacity("the queue is full")
            return await super().pool(request)

    async with both_servers(Full()) as (rest, address):
        assert await bench("--url", f"http://127.0.0.1:{rest.port}", "--num-requests", "3", "--input-len", "9") == 1
        assert "3 x HTTP 429: the queue is full" in capsys.readouterr().out
        assert await bench("--grpc", address, "--num-requests", "3", "--input-len", "9") == 1
        assert "the warm-up failed: RESOURCE_EXHAUSTED: the queue is full" in capsys.readouterr().err


async def test_a_grid_has_a_row_for_each_point(capsys: pytest.CaptureFixture[str]) -> None:
    async with both_servers(FakePooler()) as (rest, _):
        flags = ["--url", f"http://127.0.0.1:{rest.port}", "--num-requests", "4", "--input-len", "9", "--token-ids"]
        words = ["embed", "--vary", "texts-per-request=1,4", "--", *flags]
        assert await asyncio.to_thread(sweep.main, words) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert "texts/s" in header
    assert [row.split()[0] for row in rows] == ["1", "4"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--texts-per-request", "0"], "--texts-per-request is 0; give 1 to 2048"),
        (["--input-len", "9:3"], "LEAST is not over MOST"),
        (["--dimensions", "-1"], "--dimensions must be at least 0"),
        (["--duration", "3"], "--duration alone has no end"),
        (["--rate", "0"], "--rate must be over 0"),
        (["--percentiles", "x"], "--percentiles"),
        (["--dataset-path", "x", "--token-ids"], "--token-ids: the file of --dataset-path has the texts"),
    ],
)
def test_wrong_flags_are_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_embed.main(flags) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"text": ""}\n', "line 1 needs a text"), ("{\n", "line 1 is no JSON"), ("", "has no texts")],
)
async def test_a_wrong_line_of_a_file_is_named(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(content)
    async with both_servers(FakePooler()) as (rest, _):
        assert await bench("--url", f"http://127.0.0.1:{rest.port}", "--dataset-path", str(path)) == 1
    assert message in capsys.readouterr().err
