"""The CUDA executor's steps from launch to result. Needs no GPU: events of the device are a stand-in with a clock."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from baton.worker.core import StepPlan
from baton.worker.executors.base import DeviceLost
from baton.worker.executors.cuda.completions import DeviceWatch
from baton.worker.executors.cuda.sampling.generate_head import Computed
from baton.worker.executors.cuda.steps.launched import LaunchedSteps

NONE = np.empty(0, np.int32)


class Event:
    """An event that passes when it is recorded."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = Event.now
        self.error: Exception | None = None
        self.passed = True

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error

    def elapsed_time(self, later: Event) -> float:
        return 1000 * (later.at - self.at)


def at(seconds: float) -> Event:
    Event.now = seconds
    return Event()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LaunchedSteps]:
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **how: empty(*sizes, **how))
    return lambda traced=False: LaunchedSteps(2, 2, DeviceWatch(), lambda: None, traced=traced)


def add(steps: LaunchedSteps, number: int, tokens: list[int], started: float, done: float, **more: object) -> None:
    samples = np.ones(len(tokens), np.bool_)
    rows = np.arange(len(tokens), dtype=np.int32)
    plan = StepPlan(number, rows=rows, num_scheduled_tokens=rows, num_computed_tokens=rows, samples=samples)
    begun = at(started)
    Event.now = done
    left_out = more.pop("left_out", NONE)
    steps.add(plan, Computed(torch.tensor(tokens, dtype=torch.int32), left_out), begun, **more)


def test_results_come_in_the_order_of_launches_and_outlive_the_memory_that_is_used_again(make):
    steps = make()
    results = []
    for number in range(6):
        add(steps, number, [number, 10 + number], started=number, done=number + 0.5)
        if number:
            results.append(steps.collect())
    assert [result.step for result in results] == [0, 1, 2, 3, 4]
    assert [result.token_ids.tolist() for result in results] == [[number, 10 + number] for number in range(5)]
    assert {result.seconds for result in results} == {0.5}
    assert {result.idle_seconds for result in results} == {None}


def test_a_wait_for_masks_is_not_the_devices_time_and_rows_without_a_mask_have_no_token(make):
    steps = make()
    waited = (at(1.0), at(3.0))
    add(steps, 1, [7, 8], started=0.0, done=4.0, waited=waited, left_out=np.array([0], np.int32))
    result = steps.collect()
    assert result.seconds == 2.0
    assert result.token_ids.tolist() == [8]
    assert result.counts.tolist() == [0, 1]


def test_traced_steps_have_the_time_between_them(make):
    steps = make(traced=True)
    for number in range(2):
        add(steps, number, [1], started=10.0 * number, done=10.0 * number + 4)
    assert [steps.collect().idle_seconds for _ in range(2)] == [None, 6.0]


def test_a_step_that_fails_is_gone_and_the_next_can_be_collected(make, monkeypatch):
    steps = make()
    add(steps, 1, [1], 0.0, 1.0)
    add(steps, 2, [2], 1.0, 2.0)
    steps._launched[0].done.error = RuntimeError("an illegal instruction")
    with pytest.raises(RuntimeError, match="an illegal instruction"):
        steps.collect()
    assert steps.collect().step == 2
    assert steps.ended(), "there is none"


def test_a_device_that_no_longer_answers_is_lost(make):
    def wait() -> None:
        raise RuntimeError("unspecified launch failure")

    steps = make()
    steps._wait = wait
    add(steps, 1, [1], 0.0, 1.0)
    steps._launched[0].done.error = RuntimeError("unspecified launch failure")
    with pytest.raises(DeviceLost):
        steps.collect()


def test_watchers_are_notified_of_steps_in_flight_and_of_later_ones(make):
    steps, ends = make(), []
    add(steps, 1, [1], 0.0, 1.0)
    steps._launched[0].done.passed = False
    assert not steps.ended()
    steps.watch(lambda: ends.append(1))
    add(steps, 2, [2], 1.0, 2.0)
    steps._watch.close()  # after what it waits for
    assert len(ends) == 2
    steps.watch(None)
    add(steps, 3, [3], 2.0, 3.0)
    assert len(ends) == 2
    assert steps.drop()
    assert not steps.drop()
