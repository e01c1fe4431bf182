"""Traces the time of each engine step, one JSON line a step. Measures around engine and executor.

`prepare` is the host's work before the launch (scheduling, planning), `launch` the executor's launch on the host, `gap`
the device's idle time before the step, `device` its own time, `wait` the host's wait for the step and its tokens,
`update` the engine's work with them, `interval` from the end of the previous step to the end of this one.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from baton.rpc.errors import InvalidRequest
from baton.worker.core import StepPlan, StepResult
from baton.worker.executors.base import Executor
from baton.worker.process.steps.wrapped_executor import WrappedExecutor

_log = logging.getLogger(__name__)

COLUMNS = ("prepare_us", "launch_us", "gap_us", "device_us", "wait_us", "update_us", "interval_us")
KINDS = ("prefill", "mixed", "decode")
_KEPT_STEPS = 1 << 17  # in the summary

Answer = TypeVar("Answer")


@dataclass(slots=True)
class StepTimes:
    """The times of one step, in microseconds."""

    step: int
    num_decodes: int
    num_prefill_tokens: int
    # Guessed tokens that the step verified, and those that were right.
    num_draft_tokens: int = field(default=0, kw_only=True)
    num_accepted_tokens: int = field(default=0, kw_only=True)
    prepare_us: float
    launch_us: float
    gap_us: float | None = None  # None: the executor does not measure it
    device_us: float = 0.0
    wait_us: float = 0.0
    update_us: float = 0.0
    interval_us: float = 0.0


class StepTrace:
    """Writes a line for each step of one engine. The engine's thread uses it."""

    def __init__(self, path: str, clock: Callable[[], float] = time.perf_counter) -> None:
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise InvalidRequest(
                f"trace_steps={path!r} cannot be written: {error.strerror}", field="trace_steps"
            ) from error
        self._path = path
        self._clock = clock
        self._launched: deque[StepTimes] = deque()
        self._kept: deque[dict[str, Any]] = deque(maxlen=_KEPT_STEPS)
        self._collected: StepTimes | None = None  # in the current turn
        self._began = 0.0
        self._collect_ended = 0.0

    def step(self, step: Callable[[], Answer]) -> Answer:
        """Times one turn of the engine: `step` launches a step, collects one, both or neither."""
        self._began = self._clock()
        answer = step()
        times = self._collected
        if times is not None:
            times.update_us = _us(self._clock() - self._collect_ended)
            self._collected = None
            line = asdict(times)
            self._kept.append(line)
            self._file.write(json.dumps(line) + "\n")
        return answer

    def launch(self, launch: Callable[[StepPlan], None], plan: StepPlan) -> None:
        """Times a launch. A failed launch has no line."""
        began = self._clock()
        launch(plan)
        num_prefill_tokens = plan.num_prefill_tokens
        self._launched.append(
            StepTimes(
                plan.step,
                plan.num_decodes,
                num_prefill_tokens,
                prepare_us=_us(began - self._began),
                launch_us=_us(self._clock() - began),
            )
        )

    def collect(self, collect: Callable[[], StepResult]) -> StepResult:
        """Times a collection."""
        times = self._launched.popleft()
        began = self._clock()
        result = collect()
        ended = self._clock()
        if result.drafted is not None:
            times.num_draft_tokens = int(result.drafted.sum())
            times.num_accepted_tokens = int(np.maximum(result.counts[: times.num_decodes] - 1, 0).sum())
        times.wait_us = _us(ended - began)
        times.device_us = _us(result.seconds)
        times.gap_us = None if result.idle_seconds is None else _us(result.idle_seconds)
        # There is no interval before the first step.
        times.interval_us = _us(ended - self._collect_ended) if self._collect_ended else 0.0
        self._collect_ended = ended
        self._collected = times
        return result

    def close(self) -> None:
        """Closes the file, and logs the summary. Idempotent."""
        if self._file.closed:
            return
        self._file.close()
        for line in summary(self._kept):
            _log.info("%s", line)
        _log.info("step trace written", extra={"path": self._path})


class TracedExecutor(WrappedExecutor):
    """An Executor with a trace of its steps."""

    def __init__(self, executor: Executor, trace: StepTrace) -> None:
        super().__init__(executor)
        self._trace = trace

    def launch(self, plan: StepPlan) -> None:
        self._trace.launch(self._executor.launch, plan)

    def collect(self) -> StepResult:
        return self._trace.collect(self._executor.collect)


def kind_of(line: Mapping[str, Any]) -> str:
    """Returns the kind of a step, by what it computed."""
    if not line["num_prefill_tokens"]:
        return "decode"
    return "mixed" if line["num_decodes"] else "prefill"


def summary(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns a table: median and 99th percentile of every column, for each kind of step."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in KINDS}
    for line in lines:
        by_kind[kind_of(line)].append(line)
    head = f"{'steps':>8} {'kind':<8}" + "".join(f"{name.removesuffix('_us'):>18}" for name in COLUMNS)
    table = [head + "   (median / p99, us)"]
    for kind, found in by_kind.items():
        if found:
            cells = "".join(f"{_cell([line[name] for line in found]):>18}" for name in COLUMNS)
            table.append(f"{len(found):>8} {kind:<8}{cells}")
    return table


def _cell(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    median, high = np.percentile(known, [50, 99])
    return f"{median:.0f} / {high:.0f}"


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
