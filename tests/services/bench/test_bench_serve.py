import asyncio
import contextlib
import json
import math
import random

import pytest
from support.gateway.rest_harness import SAMPLE, FakeGenerator, rest_side
from support.gateway.scripted_services import ScriptedRouter, ScriptedWorker
from support.processes.ports import free_ports

from baton.gateway.config import GatewayConfig
from baton.gateway.server import serve
from baton.rpc.errors import NoCapacity
from baton.services.bench.datasets.prompts import Lengths
from baton.services.bench.serve import command as bench_serve
from baton.services.bench.serve.http_stream import EventSplitter
from baton.services.bench.serve.load import Load, _Level, progress_line
from baton.services.bench.serve.openai_client import _Answer
from baton.services.bench.serve.show import remarks
from baton.services.bench.serve.stats import Limits, Record, Spread, percentile, summarize


def record(due=0.0, ttft=0.1, gap=0.01, num_output=4, error=""):
    made = Record(due, sent=due, wanted_prompt=8, wanted_output=num_output, num_prompt=8, num_output=num_output)
    for index in range(num_output):
        made.token(due + ttft + gap * index)
    made.error = error
    made.close(made.last)
    return made


def test_percentiles_lie_between_the_nearest_values():
    ordered = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [percentile(ordered, share) for share in (0, 0.5, 0.9, 1)] == pytest.approx([1, 3, 4.6, 5])
    assert percentile([7.0], 0.99) == 7
    shuffled = random.Random(0).sample(range(1001), 1001)
    spread = Spread.of([float(value) for value in shuffled])
    assert (spread.mean, spread.p50, spread.p90, spread.p99, spread.max) == pytest.approx((500, 500, 900, 990, 1000))
    assert Spread.of([]) is None


def test_a_summary_counts_tokens_errors_and_good_requests():
    slow = record(due=1.0, ttft=0.5)
    halting = record(due=1.0, gap=0.2)
    records = [record(), slow, halting, record(due=1.0, error="lost")]
    summary = summarize(records, 2.0, None, Limits(ttft=0.2, itl=0.05), cpu_seconds=0.17)
    assert summary.seconds == pytest.approx(1.7)
    assert (summary.num_requests, summary.num_whole, summary.num_good, summary.errors) == (4, 3, 1, {"lost": 1})
    assert summary.goodput == pytest.approx(1 / 1.7)
    assert summary.output_tokens_per_second == pytest.approx(16 / 1.7)
    assert summary.cpu_share == pytest.approx(0.1)
    assert summary.ttft.max == pytest.approx(0.5)
    assert summary.tpot.max == pytest.approx(0.2)


def test_an_answer_with_too_few_tokens_is_an_error():
    made = Record(0.0, wanted_output=8, num_output=7)
    made.close(1.0)
    assert made.error == "ended early"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_found_wherever_the_stream_is_cut(size):
    events = []
    splitter = EventSplitter(lambda data, now: events.append(data))
    stream = b'data: {"a":1}\n\n: a comment\n\ndata:{"b":2}\r\n\r\ndata: [DONE]\n\n'
    for start in range(0, len(stream), size):
        splitter.feed(stream[start : start + size], 0.0)
    assert events == [b'{"a":1}', b'{"b":2}', b"[DONE]"]


def test_lengths_are_fixed_or_a_range():
    assert Lengths.parse("512") == Lengths(512, 512)
    assert Lengths.parse("8:16") == Lengths(8, 16)
    for wrong in ("0", "16:8", "x", "8-16"):
        with pytest.raises(ValueError, match="length"):
            Lengths.parse(wrong)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--duration", "3"], "--duration alone has no end"),
        (["--rate", "0"], "--rate must be over 0"),
        (["--sweep", "1,0"], "levels must be over 0"),
        (["--sweep", "1.5", "--sweep-by", "concurrency"], "whole numbers"),
        (["--png", "x.png"], "--png draws the curve of a --sweep"),
        (["--shared-prefix", "2"], "a share from 0 to 1"),
        (["--input-len", "9:3"], "LEAST is not over MOST"),
    ],
)
def test_wrong_flags_are_one_line_with_the_allowed_values(flags, message, capsys):
    assert bench_serve.main(flags) == 2
    assert message in capsys.readouterr().err


def test_a_missing_matplotlib_is_reported_before_any_load(monkeypatch, capsys):
    monkeypatch.setattr(bench_serve.serve_plot, "is_missing", lambda: True)
    assert bench_serve.main(["--sweep", "1,2", "--png", "x.png"]) == 2
    assert "pip install 'baton-inference[bench]'" in capsys.readouterr().err


def test_no_server_is_one_clear_line(capsys):
    (port,) = free_ports(1)
    assert bench_serve.main(["--url", f"http://127.0.0.1:{port}"]) == 1
    assert "GET /v1/models: ConnectionRefusedError" in capsys.readouterr().err


def test_the_progress_line_shows_how_far_and_how_fast():
    level = _Level(Load(math.inf, 8, 20, None), began=10.0, num_done=5, num_errors=1, num_tokens=640)
    assert progress_line(level, 12.0) == "[######..................] 5/20 done, 0 running, 1 errors, 320 tok/s, 2 s"


def all_tokens(generation):
    """Every token that was asked for."""
    count = generation.request.stop.max_tokens
    for _ in range(count):
        generation.emit("a ")
    generation.finish(reason="length")
    generation.done(count)


async def bench(*flags):
    return await asyncio.to_thread(bench_serve.main, [*flags, "--warm-up", "1"])


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_prompts_and_answers_over_http_have_the_exact_lengths(endpoint, tmp_path, capsys):
    path = tmp_path / "serve.json"
    async with rest_side(all_tokens) as rest:
        url = f"http://127.0.0.1:{rest.port}"
        lengths = ("--input-len", "40:90", "--output-len", "2:6", "--shared-prefix", "0.5")
        load = ("--num-requests", "12", "--concurrency", "4", "--json", str(path))
        assert await bench("--url", url, "--endpoint", endpoint, *lengths, *load) == 0
        prompts = [generation.request.prompt_token_ids for generation in rest.generator.started[1:]]
    assert "12 of 12 requests" in capsys.readouterr().out
    (level,) = json.loads(path.read_text())["levels"]
    assert (level["num_requests"], level["errors"], level["num_inexact_prompts"]) == (12, {}, 0)
    assert level["num_prompt_tokens"] == sum(map(len, prompts))
    assert all(40 <= len(prompt) <= 90 for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 12
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    assert level["rate"] is None
    assert level["ttft"]["p50"] > 0


def answered(*deltas):
    """The record of a chat whose stream has these deltas, a second apart."""
    made = Record(0.0)
    answer = _Answer(made)
    for second, delta in enumerate(deltas, 1):
        answer.feed(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode(), float(second))
    return made


def test_reasoning_and_calls_are_output_as_text_is():
    call = {"index": 0, "function": {"arguments": "{}"}}
    made = answered({"role": "assistant"}, {"reasoning": "Hm"}, {"content": "Yes"}, {"tool_calls": [call]}, {})
    assert (made.first, list(made.gaps)) == (2.0, [1.0, 1.0])


async def test_a_ramp_and_a_trace_are_named_and_late_requests_too(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2}\n' * 3)
    ramp = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "100", "--ramp-up-end-rps", "500")
    generator = FakeGenerator(all_tokens)
    generator.refusal = NoCapacity("full")
    async with rest_side(generator=generator) as rest:
        url = ("--url", f"http://127.0.0.1:{rest.port}", "--endpoint", "completions", "--warm-up", "0")
        for flags, named in (
            (("--num-requests", "3", "--input-len", "9", *ramp), "100 to 500/s: 3 x HTTP 429"),
            (("--dataset-name", "trace", "--dataset-path", str(trace)), "as recorded: 3 x HTTP 429"),
        ):
            await asyncio.to_thread(bench_serve.main, [*url, *flags])
            assert named in capsys.readouterr().out
    late = summarize([Record(due=0.0, sent=1.0, ended=2.0)], math.inf, None, Limits(), 0.0)
    assert any("sent late, p99 1000 ms" in line for line in remarks([late]))


async def test_refusals_are_counted_by_their_message(capsys):
    async with rest_side(all_tokens) as rest:
        rest.generator.refusal = None
        url = f"http://127.0.0.1:{rest.port}"

        def refuse_after_warm_up(generation):
            all_tokens(generation)
            rest.generator.refusal = NoCapacity("the queue is full")

        rest.generator.script = refuse_after_warm_up
        assert await bench("--url", url, "--num-requests", "3", "--input-len", "40", "--output-len", "2") == 1
    assert "3 x HTTP 429: the queue is full" in capsys.readouterr().out


async def test_a_sweep_draws_its_load_curve(tmp_path, capsys):
    path = tmp_path / "load.png"
    async with rest_side(all_tokens) as rest:
        url = f"http://127.0.0.1:{rest.port}"
        load = ("--sweep", "50,100", "--num-requests", "5", "--input-len", "30", "--output-len", "3")
        assert await bench("--url", url, "--endpoint", "completions", *load, "--png", str(path)) == 0
    shown = capsys.readouterr()
    assert "50/s" in shown.out
    assert "100/s" in shown.out
    assert path.read_bytes().startswith(b"\x89PNG")


@contextlib.asynccontextmanager
async def whole_gateway():
    """The gateway service over a scripted router and worker; its gRPC address."""
    rest, rpc = (f"127.0.0.1:{port}" for port in free_ports(2))
    stop = asyncio.Event()
    script = ScriptedWorker("w1", lambda submit: [7] * submit.stop.max_tokens)
    async with script as worker, ScriptedRouter([worker]) as router:
        config = GatewayConfig(rest_listen=rest, grpc_listen=rpc, router=(router.address,), model=str(SAMPLE))
        service = asyncio.create_task(serve(config, stop))
        try:
            yield rpc
        finally:
            stop.set()
            await service


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_the_public_grpc_api_is_driven_too(endpoint, tmp_path):
    path = tmp_path / "serve.json"
    async with whole_gateway() as address:
        load = ("--input-len", "40", "--output-len", "8", "--num-requests", "6", "--rate", "200", "--json", str(path))
        assert await bench("--grpc", address, "--endpoint", endpoint, *load) == 0
    (level,) = json.loads(path.read_text())["levels"]
    assert (level["num_requests"], level["errors"], level["num_inexact_prompts"]) == (6, {}, 0)
    assert level["num_output_tokens"] == 48
    assert level["itl"]["p50"] > 0
