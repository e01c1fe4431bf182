"""The kernels of an engine's steps by name: how often each runs in a step, and how long."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from baton.services.bench.report import render_table

MOST_NAMES = 30  # that are printed
_LONGEST_NAME = 96
_MICRO = 1e6


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All launches of one kernel. On a CPU: an op of PyTorch, without the ops that it calls."""

    name: str
    calls: float  # a step
    microseconds: float  # a step


@dataclass(frozen=True, slots=True)
class ProfiledSteps:
    """Some steps of one kind."""

    workload: str
    kind: str
    num_steps: int
    seconds: float  # of all, as the engine's thread sees them, while profiled
    kernels: tuple[KernelTime, ...]  # the longest first

    @property
    def busy_microseconds(self) -> float:
        """Returns the time of all kernels of a step."""
        return sum(one.microseconds for one in self.kernels)

    def lines(self, markdown: bool) -> Iterator[str]:
        """Yields a heading and the table."""
        wall = self.seconds / self.num_steps * _MICRO
        yield (
            f"{self.workload}, {self.kind}: {self.num_steps} steps of {wall:,.0f} us, of which kernels take "
            f"{self.busy_microseconds:,.0f} us ({self.busy_microseconds / wall:.0%}) in "
            f"{sum(one.calls for one in self.kernels):,.0f} launches"
        )
        shown, rest = self.kernels[:MOST_NAMES], self.kernels[MOST_NAMES:]
        if rest:
            name = f"{len(rest)} others"
            shown += (KernelTime(name, sum(one.calls for one in rest), sum(one.microseconds for one in rest)),)
        cells = [
            (
                one.name,
                f"{one.calls:,.1f}",
                f"{one.microseconds / one.calls:,.1f}",
                f"{one.microseconds:,.0f}",
                f"{one.microseconds / max(self.busy_microseconds, 1e-9):.1%}",
            )
            for one in shown
        ]
        yield render_table(["kernel", "a step", "us each", "us a step", "share"], cells, markdown)


def profiled(
    step: Callable[[], Any], count_steps: Callable[[], int], most: int, goes_on: Callable[[], bool]
) -> tuple[int, float, tuple[KernelTime, ...]]:
    """Returns the steps, their seconds and their kernels, of at most `most` steps while `goes_on`."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_device = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU
    _wait(on_device)
    with profile(activities=[activity]) as recorded:
        first, began = count_steps(), time.perf_counter()
        while count_steps() - first < most and goes_on():
            step()
        _wait(on_device)
        num_steps, seconds = count_steps() - first, time.perf_counter() - began
    return num_steps, seconds, tuple(_times(recorded.key_averages(), max(1, num_steps), on_device))


def _wait(on_device: bool) -> None:
    if on_device:
        import torch

        torch.cuda.synchronize()


def _times(events: Sequence[Any], num_steps: int, on_device: bool) -> list[KernelTime]:
    found = []
    for event in events:
        spent = event.self_device_time_total if on_device else event.self_cpu_time_total
        if spent > 0:
            found.append(KernelTime(_short(event.key), event.count / num_steps, spent / num_steps))
    return sorted(found, key=lambda one: -one.microseconds)


def _short(name: str) -> str:
    """Returns a kernel's name without what templates make long."""
    name = re.sub(r"^void ", "", name).replace("at::native::", "")
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."
