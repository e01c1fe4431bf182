"""A stalled device is distinguished from a slow one, and from a step of a new shape."""

from __future__ import annotations

import os

import numpy as np
import pytest
from support.engine.engine_harness import Clock, make_request, prompt_of

from baton.worker.core import Row, RowInit, SamplingParams, StepPlan, TokenMasks
from baton.worker.engine.engine import Engine
from baton.worker.engine.step_limits import (
    FACTOR,
    LEARNT,
    NOVEL_SECONDS,
    NOVEL_STEPS,
    OUTLIER,
    START_STEPS,
    StepLimits,
    shape_of,
)
from baton.worker.executors.sim.executor import SimExecutor, SimSettings
from baton.worker.front.step_watchdog import TICK_SECONDS, StepWatchdog, cpu_seconds_of
from baton.worker.link.step_status import StepStatus
from baton.worker.scheduling.settings import EngineSettings

LEAST = 0.25
TICKS = round(LEAST / TICK_SECONDS) + 1


def plan(decodes: int = 4, prompt: int = 0, context: int = 400, admitted: list[RowInit] | None = None) -> StepPlan:
    rows = decodes + (prompt > 0)
    scheduled = [1] * decodes + ([prompt] if prompt else [])
    computed = [context // decodes] * decodes + ([0] if prompt else [])
    return StepPlan(
        step=1,
        admitted=admitted or [],
        rows=np.arange(rows, dtype=np.int32),
        num_scheduled_tokens=np.array(scheduled, np.int32),
        num_computed_tokens=np.array(computed, np.int32),
        num_decodes=decodes,
    )


def limits_that_know(step: StepPlan, seconds: float = 0.01, num_steps: int = START_STEPS + LEARNT) -> StepLimits:
    limits = StepLimits(LEAST)
    for _ in range(num_steps):
        limits.limit(step, shape_of(step))
        limits.observe(shape_of(step), seconds)
    return limits


def limit_of(limits: StepLimits, step: StepPlan) -> float:
    return limits.limit(step, shape_of(step))


def test_the_first_steps_may_take_any_time():
    step = plan()
    assert limit_of(limits_that_know(step, num_steps=START_STEPS - 1), step) == 0
    assert limit_of(limits_that_know(step, num_steps=START_STEPS), step) == LEAST


def test_a_limit_is_ten_times_the_usual_duration_of_the_shape():
    step = plan(prompt=2048)
    assert limit_of(limits_that_know(step, 0.3), step) == pytest.approx(FACTOR * 0.3)


@pytest.mark.parametrize(
    "other", [plan(decodes=64), plan(prompt=2048), plan(context=100_000)], ids=["decodes", "prompt", "context"]
)
def test_a_shape_that_is_new_may_take_long(other):
    limits = limits_that_know(plan())
    for _ in range(LEARNT):
        assert limit_of(limits, other) == NOVEL_SECONDS
        limits.observe(shape_of(other), 2.0)
    assert limit_of(limits, other) == FACTOR * 2.0
    assert limit_of(limits, plan()) == LEAST


def test_masks_make_another_shape():
    masked = plan()
    masked.masks = TokenMasks(np.zeros(1, np.int32), np.zeros((1, 1), np.int32))
    assert limit_of(limits_that_know(plan()), masked) == NOVEL_SECONDS


def test_sampling_that_is_new_is_let_off_for_a_while_and_once():
    limits = limits_that_know(plan())
    novel = RowInit(Row(0), np.zeros(3, np.int32), 3, SamplingParams(top_p=0.5))
    assert limit_of(limits, plan(admitted=[novel])) == NOVEL_SECONDS
    for _ in range(NOVEL_STEPS):
        assert limit_of(limits, plan()) == NOVEL_SECONDS
        limits.observe(shape_of(plan()), 0.01)
    assert limit_of(limits, plan()) == LEAST
    assert limit_of(limits, plan(admitted=[novel])) == LEAST


def test_no_step_has_a_limit_while_paused_or_switched_off():
    limits = limits_that_know(plan())
    limits.paused = True
    assert limit_of(limits, plan()) == 0
    limits.paused = False
    assert limit_of(limits, plan()) == LEAST
    off = StepLimits(0.0)
    for _ in range(2 * START_STEPS):
        off.observe(shape_of(plan()), 0.01)
    assert limit_of(off, plan()) == 0


def test_steps_that_become_slow_raise_their_limit_before_they_reach_it():
    limits = limits_that_know(plan(), 0.03)
    seconds = 0.03
    for _ in range(60):  # a machine that gets ever more to do: each step takes a fifth more than the one before
        assert seconds < limit_of(limits, plan())
        limits.observe(shape_of(plan()), seconds)
        seconds *= 1.2


def test_one_stall_does_not_hide_the_next():
    limits = limits_that_know(plan(), 0.05)
    limits.observe(shape_of(plan()), 60.0)
    assert limit_of(limits, plan()) == pytest.approx(FACTOR * OUTLIER * 0.05)
    for _ in range(300):
        limits.observe(shape_of(plan()), 0.05)
    assert limit_of(limits, plan()) < 1.1 * FACTOR * 0.05


class Told:
    def __init__(self) -> None:
        self.changes: list[bool] = []
        self.cpu_seconds = 0.0
        self.step_status = StepStatus()
        self.watch = StepWatchdog(self.step_status, self.changes.append, lambda: self.cpu_seconds)

    def look(self, ticks: int, on_time: bool = True) -> None:
        for _ in range(ticks):
            self.watch.look(on_time)


async def test_a_step_beyond_its_limit_and_its_end_are_reported_once():
    told = Told()
    told.step_status.begin(LEAST)
    told.look(TICKS - 1)
    assert told.changes == []
    told.look(10 * TICKS)
    assert told.changes == [True]
    assert told.watch.stalled
    told.step_status.begin(0.0)
    told.look(1)
    assert told.changes == [True, False]


async def test_steps_that_end_are_no_stall_however_many():
    told = Told()
    for _ in range(100):
        told.step_status.begin(LEAST)
        told.look(TICKS - 1)
    told.step_status.begin(0.0)
    told.look(10 * TICKS)
    assert told.changes == []


async def test_late_ticks_report_no_stall():
    told = Told()
    told.step_status.begin(LEAST)
    told.look(10 * TICKS, on_time=False)
    assert told.changes == []
    told.look(TICKS)
    assert told.changes == [True]


async def test_a_device_that_uses_cpu_time_is_slow_and_not_stalled():
    told = Told()
    told.step_status.begin(LEAST)
    for _ in range(10 * TICKS):
        told.look(1)
        told.cpu_seconds += 0.1 * TICK_SECONDS  # a tenth of a processor
    assert told.changes == []
    told.look(100 * TICKS)
    assert told.changes == [True]


async def test_the_cpu_time_of_idle_threads_does_not_count():
    told = Told()
    told.step_status.begin(LEAST)
    for _ in range(2 * TICKS):
        told.look(1)
        told.cpu_seconds += 0.005 * TICK_SECONDS
    assert told.changes == [True]


async def test_a_closed_watchdog_does_not_poll():
    told = Told()
    told.step_status.begin(LEAST)
    told.watch.wake()
    told.watch.close()
    told.watch.wake()
    assert told.watch._timer is None


def test_two_processes_share_a_step_status():
    descriptor = StepStatus.new_file()
    child = os.fork()
    if not child:
        StepStatus.at(descriptor).begin(1.5)
        os._exit(0)
    os.waitpid(child, 0)
    assert StepStatus.at(descriptor).read() == (1, 1.5)
    os.close(descriptor)


def test_a_process_that_computes_uses_cpu_time():
    read = cpu_seconds_of(os.getpid())
    before = read()
    while read() == before:
        sum(range(10_000))
    assert cpu_seconds_of(2**30)() == 0


def test_an_engine_publishes_the_limit_of_every_step_and_none_when_idle():
    clock = Clock()
    step_status = StepStatus()
    seen: list[float] = []

    def sleep(seconds: float) -> None:
        seen.append(step_status.read()[1])
        clock.now += seconds

    executor = SimExecutor(SimSettings(num_blocks=256, max_num_requests=32, max_model_len=512), clock, sleep)
    engine = Engine(executor, EngineSettings(max_num_requests=32), 1, clock, step_status=step_status)
    for salt in range(3):
        engine.submit(make_request(prompt_of(40, salt), 200))
    while engine.has_work():
        engine.step()
    assert seen[0] == 0.0
    assert LEAST in seen
    assert seen[-1] in (0.0, LEAST)
    assert step_status.read()[1] == 0.0


async def test_progress_grows_with_each_step():
    step_status = StepStatus()
    watch = StepWatchdog(step_status, lambda stalled: None)
    before = watch.progress
    step_status.begin(LEAST)
    step_status.begin(0.0)
    assert watch.progress == before + 2
