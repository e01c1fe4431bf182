"""CPU and memory of a fleet's processes, from /proc. Knows no request."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def tree(roots: Iterable[int]) -> list[int]:
    """Returns these processes and all that descend from them."""
    found: list[int] = []
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                waiting += map(int, children.read_text().split())
            except OSError:
                continue  # the thread ended
    return found


def cpu_seconds(roots: Iterable[int]) -> float:
    """Returns the CPU time of the processes and of the children that they reaped."""
    total = 0
    for pid in tree(roots):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended; its parent counts it once reaped
        total += sum(map(int, fields[11:15]))
    return total / _TICK


def resident_bytes(roots: Iterable[int]) -> int:
    """Returns the resident memory of the processes."""
    total = 0
    for pid in tree(roots):
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
        except OSError:
            continue
    return total


def scheduled_seconds(pid: int) -> float:
    """Returns the CPU time of a process's live threads by the scheduler's clock, finer than ticks."""
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(task.read_text().split()[0])
        except OSError:
            continue
    return total / 1e9


def percentile(values: Sequence[float], part: float) -> float:
    """Returns the value below which this part of the values lies; 0.0 of none."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(part * len(ranked)))] if ranked else 0.0
