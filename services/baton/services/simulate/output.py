"""The results of a simulation: a table, JSON, and curves over the load as a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from baton.rpc.errors import InvalidRequest
from baton.services.simulate.cluster.metrics import Summary

if TYPE_CHECKING:
    from baton.services.simulate.chaos.simulation import ChaosReport, ChaosTotals

_HEADER = (
    "policy",
    "load",
    "offered/s",
    "done/s",
    "good/s",
    "good",
    "refused",
    "TTFT p50",
    "p90",
    "p99",
    "ITL p50",
    "p99",
    "hits",
    "remote",
    "imbalance",
    "x real",
)


def table(summaries: Sequence[Summary]) -> str:
    """Returns one line per run, with TTFT and ITL in milliseconds."""
    rows = [list(_HEADER), *(_cells(summary) for summary in summaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join(lines)


def write_json(path: Path, summaries: Sequence[Summary], facts: Mapping[str, Any]) -> None:
    """Returns all results and their settings."""
    document = {**facts, "runs": [summary.as_dict() for summary in summaries]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def plot(path: Path, summaries: Sequence[Summary], title: str) -> None:
    """Draws curves over the load, a line per policy. Raises InvalidRequest if matplotlib is missing."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise InvalidRequest("a plot needs matplotlib: pip install 'baton-inference[bench]'", field="plot") from error
    curves: tuple[tuple[str, Callable[[Summary], float]], ...] = (
        ("TTFT p50, s", lambda one: one.ttft_p50),
        ("TTFT p99, s", lambda one: one.ttft_p99),
        ("ITL p50, s", lambda one: one.itl_p50),
        ("ITL p99, s", lambda one: one.itl_p99),
        ("good requests, share of the offered", lambda one: one.good_share),
        ("goodput, requests/s", lambda one: one.goodput_per_second),
        ("cached prompt tokens, share", lambda one: one.hit_rate),
        ("prefilled elsewhere, share", lambda one: one.remote_share),
    )
    figure, axes = pyplot.subplots(2, 4, figsize=(18, 8))
    for axis, (label, value) in zip(axes.flat, curves, strict=True):
        for policy in dict.fromkeys(summary.policy for summary in summaries):
            points = sorted((one.load, value(one)) for one in summaries if one.policy == policy)
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=_short(policy))
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("load")
        axis.grid(alpha=0.3)
        if "TTFT" in label:
            axis.set_yscale("log")
    axes.flat[0].legend(fontsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def chaos_line(report: ChaosReport) -> str:
    """Returns one seed's line: events, and errors of the index."""
    parts = [
        f"{kind} {counts.num_decisions} decisions, {100 * counts.phantom_rate:.3f} % phantom,"
        f" {100 * counts.miss_rate:.3f} % missed"
        for kind, counts in report.counts.items()
    ]
    return (
        f"seed {report.seed}: {len(report.faults)} faults, {report.num_requests} requests, {report.num_failed} failed;"
        f" {'; '.join(parts)}: {'PROBLEMS' if report.problems else 'ok'}"
    )


def chaos_table(totals: ChaosTotals) -> str:
    """Returns all seeds' lines: errors of the index, and how long they lasted."""
    seconds = np.array(totals.truth_seconds or [0.0])
    p50, p99, worst = np.quantile(seconds, [0.5, 0.99, 1.0])
    lines = ["| index | decisions | phantom blocks | missed blocks |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {kind} | {counts.num_decisions} | {100 * counts.phantom_rate:.3f} % | {100 * counts.miss_rate:.2f} % |"
        for kind, counts in totals.counts.items()
    ]
    num_late = int((seconds > 1.0).sum())
    lines.append(
        f"\n{totals.num_faults} faults, {totals.num_requests} requests; seconds until nothing was believed that is not"
        f" held, after each of {len(totals.truth_seconds)} disturbances: p50 {p50:.3f}, p99 {p99:.3f}, worst"
        f" {worst:.3f}; more than one after {num_late}"
    )
    return "\n".join(lines)


def _short(policy: str) -> str:
    return policy.rpartition(":")[2]


def _cells(one: Summary) -> list[str]:
    cpu = one.extra.get("cpu_seconds", 0.0)
    return [
        _short(one.policy),
        f"{one.load:.2f}",
        f"{one.offered_per_second:.1f}",
        f"{one.completed_per_second:.1f}",
        f"{one.goodput_per_second:.1f}",
        f"{100 * one.good_share:.1f}%",
        str(one.num_refused + one.num_unfinished),
        _ms(one.ttft_p50),
        _ms(one.ttft_p90),
        _ms(one.ttft_p99),
        _ms(one.itl_p50),
        _ms(one.itl_p99),
        f"{100 * one.hit_rate:.1f}%",
        f"{100 * one.remote_share:.0f}%",
        f"{one.imbalance:.2f}",
        f"{one.extra['simulated_seconds'] / cpu:.0f}" if cpu else "-",
    ]


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1000 * seconds:.1f}"
