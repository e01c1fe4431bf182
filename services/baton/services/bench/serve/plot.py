"""Draws the load curve as a PNG. Only this module needs matplotlib."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from baton.services.bench.serve.stats import Spread, Summary


def is_missing() -> bool:
    """Returns whether matplotlib is not installed."""
    return importlib.util.find_spec("matplotlib") is None


def plot_load_curve(path: Path, summaries: Sequence[Summary], title: str) -> None:
    """Draws latency and throughput over the load."""
    from matplotlib.figure import Figure

    by_rate = not math.isinf(summaries[0].rate)
    loads = [summary.rate if by_rate else summary.concurrency or 0 for summary in summaries]
    figure = Figure(figsize=(9, 8), layout="constrained")
    latency, tokens, goodput = figure.subplots(3, 1, sharex=True)
    for name, spreads, color in (
        ("TTFT", [summary.ttft for summary in summaries], "tab:blue"),
        ("ITL", [summary.itl for summary in summaries], "tab:orange"),
    ):
        latency.plot(loads, _milliseconds(spreads, "p50"), marker="o", color=color, label=f"{name} p50")
        latency.plot(loads, _milliseconds(spreads, "p99"), marker="o", color=color, linestyle=":", label=f"{name} p99")
    latency.set_yscale("log")
    latency.yaxis.set_major_formatter("{x:g}")
    latency.yaxis.set_minor_formatter("{x:g}")
    latency.set_ylabel("ms")
    tokens.plot(loads, [summary.output_tokens_per_second for summary in summaries], marker="o", label="output tokens")
    tokens.set_ylabel("tokens/s")
    goodput.plot(loads, [summary.requests_per_second for summary in summaries], marker="o", label="finished")
    goodput.plot(loads, [summary.goodput for summary in summaries], marker="o", label="within the limits")
    goodput.set_ylabel("requests/s")
    goodput.set_xlabel("requests/s sent" if by_rate else "requests in flight")
    for axes in (latency, tokens, goodput):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    for axes in (tokens, goodput):
        axes.set_ylim(bottom=0)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=120)


def _milliseconds(spreads: Sequence[Spread | None], name: str) -> list[float]:
    return [math.nan if spread is None else 1000 * float(getattr(spread, name)) for spread in spreads]
