"""Measures a running stack under load over HTTP or gRPC: TTFT, ITL, TPOT, throughput, goodput.

baton bench serve --url http://127.0.0.1:8000 --rate 8 --num-requests 500
baton bench serve --grpc 127.0.0.1:8001 --concurrency 64 --duration 30 --input-len 128:1024
baton bench serve --sweep 1,2,4,8 --duration 20 --ttft-slo-ms 500 --itl-slo-ms 50 --png load.png
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.extend(
    str(Path(__file__).resolve().parents[3] / name) for name in ("tests", "proto", "services", "worker", "kernels")
)

import uvloop
from bench.report import facts_line, machine_facts, render_table, write_json
from bench.serve import plot as serve_plot
from bench.serve.client import BenchFailed, Client
from bench.serve.load import Load, run_level, warm_up
from bench.serve.prompts import Lengths, PromptMaker, PromptShape
from bench.serve.stats import Limits, Spread, Summary

_EXTRA = "pip install 'baton-inference[bench]'"
_LATE_SECONDS = 0.01
_BUSY_SHARE = 0.9


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the load, prints a table, writes JSON and PNG. Returns 1 if no request was complete, 2 for invalid flags."""
    options = _parser().parse_args(argv)
    try:
        loads = _loads(options)
        shape = _shape(options)
        limits = Limits(options.ttft_slo_ms / 1000, options.itl_slo_ms / 1000)
    except ValueError as error:
        print(f"baton bench serve: {error}", file=sys.stderr)
        return 2
    try:
        model, summaries = uvloop.run(_run(options, shape, loads, limits))
    except BenchFailed as error:
        print(f"baton bench serve: {error}", file=sys.stderr)
        return 1
    _show(options, model, summaries, limits)
    return 0 if all(summary.num_whole for summary in summaries) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    server = parser.add_argument_group("server").add_mutually_exclusive_group()
    server.add_argument("--url", default="http://127.0.0.1:8000", help="address of an OpenAI server (%(default)s)")
    server.add_argument("--grpc", metavar="HOST:PORT", help="address of Baton's public gRPC API, instead of --url")
    parser.add_argument(
        "--endpoint", choices=("chat", "completions"), default="chat", help="chats of text, or token ids"
    )
    parser.add_argument("--model", default="", help="name of a model (default: the first served one)")
    parser.add_argument("--api-key", default="", help="sent as a bearer token")
    parser.add_argument("--vocab-size", type=int, default=0, help="for completions of a server without /tokenize")
    load = parser.add_argument_group("load")
    load.add_argument("--rate", type=float, default=math.inf, help="requests a second, Poisson; inf: all at once")
    load.add_argument("--concurrency", type=int, help="the most requests in flight")
    load.add_argument("--num-requests", type=int, help="100 without --duration")
    load.add_argument("--duration", type=float, help="seconds during which requests are sent")
    load.add_argument("--sweep", help="levels of load like 1,2,4,8, each run as --rate")
    load.add_argument("--sweep-by", choices=("rate", "concurrency"), default="rate", help="what --sweep changes")
    load.add_argument("--warm-up", type=int, default=4, help="requests before the measurement")
    load.add_argument("--timeout", type=float, default=300.0, help="seconds until a request fails")
    load.add_argument("--seed", type=int, default=0)
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--input-len", default="512", help="tokens: N, or LEAST:MOST")
    prompts.add_argument("--output-len", default="128", help="tokens: N, or LEAST:MOST")
    prompts.add_argument("--shared-prefix", type=float, default=0.0, help="share of each prompt that its group shares")
    prompts.add_argument("--prefix-groups", type=int, default=1, help="number of different shared prefixes")
    results = parser.add_argument_group("results")
    results.add_argument("--ttft-slo-ms", type=float, default=math.inf, help="maximum TTFT of a good request")
    results.add_argument("--itl-slo-ms", type=float, default=math.inf, help="maximum of 99 %% of a good request's ITLs")
    results.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    results.add_argument("--json", type=Path)
    results.add_argument("--png", type=Path, help="file for the load curve of a --sweep")
    return parser


def _loads(options: argparse.Namespace) -> list[Load]:
    """Returns one load, or those of a sweep. Raises ValueError."""
    num_requests, duration = options.num_requests, options.duration
    if num_requests is None and duration is None:
        num_requests = 100
    for name in ("rate", "concurrency", "num_requests", "duration", "timeout", "prefix_groups"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be over 0, not {value}")
    if options.png is not None:
        if options.sweep is None:
            raise ValueError("--png draws the curve of a --sweep: give one")
        if serve_plot.is_missing():
            raise ValueError(f"--png needs matplotlib: {_EXTRA}")
    if options.sweep is None:
        loads = [Load(options.rate, options.concurrency, num_requests, duration)]
    else:
        levels = [float(word) for word in options.sweep.split(",")]
        if not all(level > 0 for level in levels):
            raise ValueError(f"--sweep {options.sweep!r}: levels must be over 0")
        loads = [_level(options, level, num_requests, duration) for level in levels]
    for load in loads:
        if load.num_requests is None and load.concurrency is None and math.isinf(load.rate):
            raise ValueError("--duration alone has no end of requests: give --rate, --concurrency or --num-requests")
    return loads


def _level(options: argparse.Namespace, level: float, num_requests: int | None, duration: float | None) -> Load:
    if options.sweep_by == "rate":
        return Load(level, options.concurrency, num_requests, duration)
    if level != int(level):
        raise ValueError(f"--sweep-by concurrency takes whole numbers, not {level}")
    return Load(options.rate, int(level), num_requests, duration)


def _shape(options: argparse.Namespace) -> PromptShape:
    if not 0 <= options.shared_prefix <= 1:
        raise ValueError(f"--shared-prefix is a share from 0 to 1, not {options.shared_prefix}")
    return PromptShape(
        Lengths.parse(options.input_len),
        Lengths.parse(options.output_len),
        options.shared_prefix,
        options.prefix_groups,
        options.endpoint == "chat",
    )


def _client(options: argparse.Namespace) -> Client:
    chat = options.endpoint == "chat"
    try:
        if options.grpc:
            from bench.serve.grpc_client import GrpcClient

            return GrpcClient(options.grpc, chat, options.model, options.timeout)
        from bench.serve.http_stream import HttpPool
        from bench.serve.openai_client import OpenAiClient
    except ImportError as error:
        raise BenchFailed(f"needs {error.name}: {_EXTRA}") from error
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        pool = HttpPool(options.url, headers)
    except ValueError as error:
        raise BenchFailed(f"--url: {error}") from error
    return OpenAiClient(pool, chat, options.model, options.timeout, options.vocab_size)


async def _run(
    options: argparse.Namespace, shape: PromptShape, loads: Sequence[Load], limits: Limits
) -> tuple[str, list[Summary]]:
    client = _client(options)
    try:
        model = await client.describe()
        maker = PromptMaker(client, shape, options.seed)
        await maker.prepare()
        if options.warm_up:
            error = await warm_up(client, maker, options.warm_up)
            if error:
                raise BenchFailed(f"the warm-up failed: {error}")
        summaries = []
        for number, load in enumerate(loads):
            summaries.append(await run_level(client, maker, load, limits, options.seed + number))
            if len(loads) > 1:
                print(f"level {number + 1} of {len(loads)} done", file=sys.stderr, flush=True)
        return model, summaries
    finally:
        await client.close()


def _show(options: argparse.Namespace, model: str, summaries: Sequence[Summary], limits: Limits) -> None:
    facts = machine_facts(())
    where = f"gRPC {options.grpc}" if options.grpc else f"{options.url}"
    print(f"serve: {model} at {where}, {options.endpoint}, {options.input_len} in / {options.output_len} out tokens,")
    print(f"  {100 * options.shared_prefix:.0f} % shared, {_limits_text(limits)}; load from {facts_line(facts)}")
    if len(summaries) == 1:
        _show_one(summaries[0], options.markdown)
    else:
        _show_levels(summaries, options.markdown)
    for line in _remarks(summaries):
        print(line)
    flags = {name: value for name, value in vars(options).items() if name not in ("api_key", "json", "png")}
    document = {**facts, "model": model, "flags": flags, "levels": [_record(summary) for summary in summaries]}
    write_json(options.json, _finite(document))
    if options.png is not None:
        title = f"{model}, {options.input_len} in / {options.output_len} out tokens, {_limits_text(limits)}"
        serve_plot.plot_load_curve(options.png, summaries, title)


def _show_one(summary: Summary, markdown: bool) -> None:
    spreads = (
        ("time to first token", summary.ttft),
        ("inter-token latency", summary.itl),
        ("time per output token", summary.tpot),
        ("end to end", summary.e2e),
    )
    rows = [(name, *_milliseconds(spread)) for name, spread in spreads]
    print(render_table(("ms", "mean", "p50", "p90", "p99", "max"), rows, markdown))
    print(_totals(summary))


def _totals(summary: Summary) -> str:
    return (
        f"{summary.num_whole} of {summary.num_requests} requests in {summary.seconds:.2f} s: "
        f"{summary.requests_per_second:.2f} requests/s, {summary.output_tokens_per_second:,.0f} out tok/s, "
        f"{summary.num_prompt_tokens / summary.seconds:,.0f} in tok/s ({summary.num_cached_tokens} of "
        f"{summary.num_prompt_tokens} cached), goodput {summary.goodput:.2f} requests/s "
        f"({100 * summary.num_good / summary.num_requests:.1f} %)"
    )


def _show_levels(summaries: Sequence[Summary], markdown: bool) -> None:
    header = ("load", "requests/s", "out tok/s", "goodput/s", "good", "errors", "TTFT p50", "p90", "p99", "ITL p50",
              "p90", "p99", "TPOT p50", "e2e p50", "p99")  # fmt: skip
    rows = []
    for summary in summaries:
        ttft, itl, tpot, e2e = (_milliseconds(s) for s in (summary.ttft, summary.itl, summary.tpot, summary.e2e))
        rows.append(
            (
                _load_text(summary),
                f"{summary.requests_per_second:.2f}",
                f"{summary.output_tokens_per_second:,.0f}",
                f"{summary.goodput:.2f}",
                f"{100 * summary.num_good / summary.num_requests:.0f} %",
                str(sum(summary.errors.values())),
                *ttft[1:4],
                *itl[1:4],
                tpot[1],
                e2e[1],
                e2e[3],
            )
        )
    print(render_table(header, rows, markdown))
    print("latencies in ms")


def _load_text(summary: Summary) -> str:
    rate = "" if math.isinf(summary.rate) else f"{summary.rate:g}/s"
    limit = "" if summary.concurrency is None else f"{summary.concurrency} in flight"
    return ", ".join(filter(None, (rate, limit))) or "all at once"


def _remarks(summaries: Sequence[Summary]) -> list[str]:
    """Returns remarks about the validity of the figures."""
    lines = []
    for summary in summaries:
        load = _load_text(summary)
        lines += [f"{load}: {count} x {error}" for error, count in summary.errors.items()]
        if summary.num_inexact_prompts:
            lines.append(f"{load}: the server counted {summary.num_inexact_prompts} prompts to another length")
        late = summary.lateness
        if late is not None and late.p99 > _LATE_SECONDS and not math.isinf(summary.rate):
            lines.append(f"{load}: requests were sent late, p99 {1000 * late.p99:.0f} ms: a limit, or a busy client")
        if summary.cpu_share > _BUSY_SHARE:
            lines.append(f"{load}: the load generator used {100 * summary.cpu_share:.0f} % of a core: it is the limit")
    shares = ", ".join(f"{100 * summary.cpu_share:.0f} %" for summary in summaries)
    return [*lines, f"CPU of the load generator: {shares} of a core"]


def _limits_text(limits: Limits) -> str:
    words = [f"TTFT <= {1000 * limits.ttft:g} ms"] if math.isfinite(limits.ttft) else []
    words += [f"ITL p99 <= {1000 * limits.itl:g} ms"] if math.isfinite(limits.itl) else []
    return "good: " + " and ".join(words) if words else "good: every answer"


def _milliseconds(spread: Spread | None) -> tuple[str, ...]:
    if spread is None:
        return ("-",) * 5
    return tuple(f"{1000 * value:.2f}" for value in dataclasses.astuple(spread))


def _record(summary: Summary) -> dict[str, Any]:
    derived = ("num_whole", "requests_per_second", "goodput", "output_tokens_per_second")
    return {**dataclasses.asdict(summary), **{name: getattr(summary, name) for name in derived}}


def _finite(value: Any) -> Any:
    """Replaces infinity, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
