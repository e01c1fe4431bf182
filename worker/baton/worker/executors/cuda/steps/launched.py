"""The steps in flight on the device, from their last launch until their results are read. Knows no model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton.worker.core import StepPlan, StepResult
from baton.worker.executors.cuda.completions import DeviceWatch
from baton.worker.executors.cuda.failures import raise_if_lost


class Pending(Protocol):
    """The results of a step that are being copied to the host."""

    def read(self, plan: StepPlan) -> StepResult:
        """Returns the result. Call once, after the copy."""


class Results(Protocol):
    """The results of a step on the device."""

    def start_copy(self, token_ids: Tensor, /) -> Pending:
        """Queues the copy to the host. `token_ids`: pinned memory for tokens, [num_rows] int32."""


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    pending: Pending
    started: torch.cuda.Event
    done: torch.cuda.Event
    waited: tuple[torch.cuda.Event, torch.cuda.Event] | None  # begin and end of the device's wait for masks

    @property
    def seconds(self) -> float:
        """Returns the device time of the step. Valid once it is done."""
        waited = 0.0 if self.waited is None else self.waited[0].elapsed_time(self.waited[1])
        return float(self.started.elapsed_time(self.done) - waited) / 1000


class LaunchedSteps:
    """Reads results in the order of launches. `wait` waits for the device. If `traced`, results have idle_seconds."""

    def __init__(
        self, num_rows: int, depth: int, watch: DeviceWatch, wait: Callable[[], None], *, traced: bool
    ) -> None:
        self._pinned = [torch.empty(num_rows, dtype=torch.int32, pin_memory=True) for _ in range(depth + 2)]
        self._turn = 0
        self._launched: deque[_Launched] = deque()
        self._last_done: torch.cuda.Event | None = None
        self._watch = watch
        self._wait = wait
        self._traced = traced
        self._wake: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._launched)

    def add(
        self,
        plan: StepPlan,
        computed: Results,
        started: torch.cuda.Event,
        waited: tuple[torch.cuda.Event, torch.cuda.Event] | None = None,
    ) -> None:
        """Queues the copy of a step's results to the host, after the rest of the step."""
        self._turn = (self._turn + 1) % len(self._pinned)
        pending = computed.start_copy(self._pinned[self._turn])
        done = record_event()
        self._launched.append(_Launched(plan, pending, started, done, waited))
        if self._wake is not None:
            self._watch.add(done, self._wake)

    def collect(self) -> StepResult:
        """Waits for the oldest step. Returns its result."""
        launched = self._launched.popleft()
        try:
            launched.done.synchronize()
        except Exception as error:
            raise_if_lost(error, self._wait)
            raise
        result = launched.pending.read(launched.plan)
        result.seconds = launched.seconds
        if self._traced:
            if self._last_done is not None:
                result.idle_seconds = self._last_done.elapsed_time(launched.started) / 1000
            self._last_done = launched.done
        return result

    def ended(self) -> bool:
        """Returns whether collect would return at once."""
        return not self._launched or self._launched[0].done.query()  # type: ignore[no-untyped-call]

    def watch(self, wake: Callable[[], None] | None) -> None:
        """Calls `wake`, on another thread, when a step has ended, including those in flight. None stops that."""
        if wake is not None and self._wake is None:
            for launched in self._launched:
                self._watch.add(launched.done, wake)
        self._wake = wake

    def drop(self) -> bool:
        """Drops the steps. Returns whether there were any."""
        launched, self._launched = self._launched, deque()
        return bool(launched)


def record_event() -> torch.cuda.Event:
    """Records an event with timing on the current stream. Returns it."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
