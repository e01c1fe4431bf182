"""Steps that end asynchronously: an engine that does not wait leaves them running, without loss."""

from __future__ import annotations

import pytest
from support.engine.engine_harness import Rig, make_executor, make_request, make_rig

from baton.worker.executors.sim.executor import SimExecutor


class SlowExecutor(SimExecutor):
    """An executor whose steps end when the test ends them."""

    num_ended = 0
    num_collected = 0

    def ended(self) -> bool:
        return self.num_collected < self.num_ended

    def collect(self):
        assert self.ended(), "the engine waited"
        self.num_collected += 1
        return super().collect()


def make_slow_rig(depth: int) -> tuple[Rig, SlowExecutor]:
    executor = SlowExecutor(make_executor(depth=depth)._settings)
    return make_rig(executor), executor


@pytest.mark.parametrize("depth", [1, 2])
def test_a_running_step_is_left_alone_until_it_has_ended(depth: int) -> None:
    rig, executor = make_slow_rig(depth)
    rig.engine.submit(make_request(range(10), max_tokens=3))
    for _ in range(3):
        assert not rig.engine.step(wait=False).token_ids
        assert rig.engine.has_work()
    assert rig.engine.waits
    assert len(executor._launched) == depth, "no more than it can take"
    found: list[int] = []
    for _ in range(20):
        executor.num_ended += 1
        found += rig.engine.step(wait=False).token_ids
    assert len(found) == 3
    assert not rig.engine.waits
    assert not rig.engine.has_work()


def test_requests_that_arrive_during_a_step_join_the_next() -> None:
    rig, executor = make_slow_rig(2)
    first = make_request(range(10), max_tokens=4)
    rig.engine.submit(first)
    rig.engine.step(wait=False)
    second = make_request(range(20, 30), max_tokens=4)
    rig.engine.submit(second)
    seen = []
    for _ in range(20):
        executor.num_ended += 1
        seen += rig.engine.step(wait=False).requests
    assert seen.count(first) == seen.count(second) == 4
    audit = rig.engine.audit()
    assert audit.num_held_blocks == 0


def test_the_prompt_of_a_running_step_is_pending_until_it_is_computed() -> None:
    rig, executor = make_slow_rig(1)
    rig.engine.submit(make_request(range(10), max_tokens=3))
    assert rig.engine.load().num_pending_prefill_tokens == 10
    rig.engine.step(wait=False)
    assert rig.engine.load().num_pending_prefill_tokens == 10, "it is launched, not computed"
    executor.num_ended += 1
    rig.engine.step(wait=False)
    assert rig.engine.load().num_pending_prefill_tokens == 0
