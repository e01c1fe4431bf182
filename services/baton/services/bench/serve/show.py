"""The tables and the JSON of `baton bench serve`."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.services.bench.datasets.choice import dataset_text
from baton.services.bench.report import facts_line, machine_facts, render_table, write_json
from baton.services.bench.serve import plot as serve_plot
from baton.services.bench.serve.options import METRICS, metrics_of, percentiles_of
from baton.services.bench.serve.stats import Limits, Spread, Summary

_LATE_SECONDS = 0.01
_BUSY_SHARE = 0.9


def show(options: argparse.Namespace, model: str, summaries: Sequence[Summary], limits: Limits) -> None:
    facts = machine_facts(())
    where = f"gRPC {options.grpc}" if options.grpc else f"{options.url}"
    print(f"serve: {model} at {where}, {options.endpoint}, {dataset_text(options)},")
    print(f"  {_limits_text(limits)}; load from {facts_line(facts)}")
    if len(summaries) == 1:
        _show_one(summaries[0], metrics_of(options), percentiles_of(options), options.markdown)
    else:
        _show_levels(summaries, options.markdown)
    for line in remarks(summaries):
        print(line)
    flags = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in ("api_key", "json", "png")
    }
    document = {**facts, "model": model, "flags": flags, "levels": [record_of(summary) for summary in summaries]}
    write_json(options.json, finite(document))
    if options.png is not None:
        title = f"{model}, {dataset_text(options)}, {_limits_text(limits)}"
        serve_plot.plot_load_curve(options.png, summaries, title)


def _show_one(summary: Summary, metrics: Sequence[str], percentiles: Sequence[float], markdown: bool) -> None:
    header = ["ms", "mean", *(f"p{one:g}" for one in percentiles), "max"]
    rows = []
    for name in metrics:
        attribute, title = METRICS[name]
        spread: Spread | None = getattr(summary, attribute)
        values = None if spread is None else (spread.mean, *spread.chosen.values(), spread.max)
        rows.append((title, *(["-"] * (len(header) - 1) if values is None else map(ms, values))))
    print(render_table(header, rows, markdown))
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
    rate = summary.schedule if math.isinf(summary.rate) else f"{summary.rate:g}/s"
    limit = "" if summary.concurrency is None else f"{summary.concurrency} in flight"
    return ", ".join(filter(None, (rate, limit))) or "all at once"


def remarks(summaries: Sequence[Summary]) -> list[str]:
    """Returns remarks about the validity of the figures."""
    lines = []
    for summary in summaries:
        load = _load_text(summary)
        lines += [f"{load}: {count} x {error}" for error, count in summary.errors.items()]
        if summary.num_inexact_prompts:
            lines.append(f"{load}: the server counted {summary.num_inexact_prompts} prompts to another length")
        late = summary.lateness
        if late is not None and late.p99 > _LATE_SECONDS:
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
    return tuple(map(ms, (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)))


def ms(seconds: float) -> str:
    """Returns milliseconds as text."""
    return f"{1000 * seconds:.2f}"


def record_of(summary: Summary) -> dict[str, Any]:
    """Returns all figures for JSON."""
    derived = ("num_whole", "requests_per_second", "goodput", "output_tokens_per_second")
    return {**dataclasses.asdict(summary), **{name: getattr(summary, name) for name in derived}}


def finite(value: Any) -> Any:
    """Replaces infinity, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
