"""Limits, results and their tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attack.fleet import STAYS, Cost
from attack.siege import Siege

from baton.services.bench.report import render_table

REFUSED_CPU = 0.5  # seconds
ACCEPTED_CPU = 1.0  # seconds
STALL = 0.05  # seconds
SLOWDOWN = 2.0

# Tokenizing and counting run no model: only generations count against limits.
_UNCOUNTED = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    must: str
    was: str
    good: bool


def misses(cost: Cost, noise: float = 1.0) -> list[str]:
    """Returns the exceeded limits of one case. `noise` is the slowdown of a busy machine."""
    found = []
    limit = noise * (ACCEPTED_CPU if cost.answer.accepted else REFUSED_CPU)
    if cost.cpu > limit and (cost.case.streamed or not cost.answer.accepted):
        found.append(f"{cost.cpu:.2f} CPU-s")
    if cost.grown > STAYS:
        found.append(f"{cost.grown / 1e6:.0f} MB stay")
    if cost.stall > noise * STALL:
        found.append(f"stall of {1000 * cost.stall:.0f} ms")
    if cost.answer.accepted and not cost.counted and cost.case.path not in _UNCOUNTED:
        found.append("not counted")
    if cost.answer.status in (0, 500):
        found.append(f"status {cost.answer.status}")
    return found


def rows(costs: Sequence[Cost], siege: Siege | None) -> list[Row]:
    """Returns the table: each row's worst case."""
    refused = [one for one in costs if not one.answer.accepted]
    accepted = [one for one in costs if one.answer.accepted and one.case.streamed]
    found = [
        Row(
            "CPU of one refused request, all services; memory that stays",
            "<= 0.5 s; <= 20 MB",
            f"{_most(refused, lambda one: one.cpu):.2f} s; {_most(costs, lambda one: one.grown) / 1e6:.1f} MB",
            not any(one.cpu > REFUSED_CPU for one in refused) and not any(one.grown > STAYS for one in costs),
        ),
        Row(
            "CPU of one accepted request up to its first token, counted against its tenant",
            "<= 1 s; all",
            f"{_most(accepted, lambda one: one.cpu):.2f} s; "
            f"{len([one for one in accepted if 'not counted' not in misses(one)])} of {len(accepted)}",
            not any(one.cpu > ACCEPTED_CPU or "not counted" in misses(one) for one in accepted),
        ),
        Row(
            "longest stall of the gateway's event loop",
            "<= 50 ms",
            f"{1000 * _most(costs, lambda one: one.stall):.0f} ms",
            not any(one.stall > STALL for one in costs),
        ),
        Row(
            "cases without an answer, or with 500",
            "0",
            str(len([one for one in costs if one.answer.status in (0, 500)])),
            not any(one.answer.status in (0, 500) for one in costs),
        ),
    ]
    if siege is not None:
        without, floor, attacked = 1000 * siege.without, 1000 * siege.floor, 1000 * siege.attacked
        found.append(
            Row(
                "p99 of a neighbour's first token while 16 clients attack, over without",
                "<= 2x",
                f"{attacked / without:.2f}x ({without:.0f} -> {attacked:.0f} ms; floor {floor:.0f} ms)",
                attacked <= SLOWDOWN * without,
            )
        )
    return found


def show(costs: Sequence[Cost], table: Sequence[Row], worst: int = 10) -> str:
    """Returns the worst cases by each measure, and the table."""
    measures: tuple[tuple[str, Callable[[Cost], float]], ...] = (
        ("CPU, s", lambda one: one.cpu),
        ("MB that stay", lambda one: one.grown / 1e6),
        ("stall, ms", lambda one: 1000 * one.stall),
    )
    parts = []
    for title, measure in measures:
        ranked = sorted(costs, key=measure, reverse=True)[:worst]
        parts.append(
            render_table(
                ("worst cases", title, "status"),
                [[one.case.name, f"{measure(one):.2f}", str(one.answer.status)] for one in ranked],
                markdown=True,
            )
        )
    lines = [[one.what, one.must, one.was, "yes" if one.good else "NO"] for one in table]
    return "\n\n".join([*parts, render_table(("what", "must", "was", "kept"), lines, markdown=True)])


def as_json(cost: Cost) -> dict[str, Any]:
    """Returns one case's figures."""
    return {
        "case": cost.case.number,
        "name": cost.case.name,
        "status": cost.answer.status,
        "cpu_seconds": cost.cpu,
        "stays_bytes": cost.grown,
        "stall_seconds": cost.stall,
        "slowest_probe_seconds": cost.latest,
        "counted": cost.counted,
        "misses": misses(cost),
    }


def _most(costs: Sequence[Cost], measure: Callable[[Cost], float]) -> float:
    return max(map(measure, costs), default=0.0)
