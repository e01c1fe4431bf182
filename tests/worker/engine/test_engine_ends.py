"""Requests that end before their time: aborts, deadlines, a device that fails."""

from __future__ import annotations

import pytest
from support.engine.engine_harness import (
    DEPTHS,
    Clock,
    Rig,
    check_all,
    expected_tokens,
    make_executor,
    make_request,
    make_rig,
    prompt_of,
)

from baton.rpc.errors import DeadlineExceeded, InternalError, NoCapacity
from baton.worker.core import FinishReason, StepPlan, StepResult
from baton.worker.executors.sim.executor import SimExecutor, SimSpeed

# Aborts and deadlines.


@DEPTHS
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_at_any_time_answers_once_and_frees_everything(steps: int, depth: int):
    rig = make_rig(make_executor(depth=depth), max_num_batched_tokens=32)
    aborted, other = make_request(prompt_of(70), 50), make_request(prompt_of(9, salt=1), 12)
    rig.submit(aborted, other)
    for _ in range(steps):
        rig.step()
    rig.engine.abort(aborted.request_id)
    rig.engine.abort(aborted.request_id)
    rig.step()
    assert rig.seen.finishes[aborted.request_id].reason is FinishReason.ABORT
    rig.drain()
    check_all(rig, [other])
    rig.engine.abort(aborted.request_id)
    rig.engine.abort("never heard of")
    assert not rig.engine.has_work()


def test_a_request_fails_at_its_deadline_and_others_continue():
    clock = Clock()
    rig = make_rig(make_executor(clock, speed=SimSpeed(base=1.0)), clock)
    late = make_request(prompt_of(5), 100, deadline=clock.now + 3.5)
    other = make_request(prompt_of(5, salt=1), 10)
    rig.submit(late, other)
    assert rig.engine.next_deadline() == late.deadline
    rig.drain()
    assert isinstance(rig.seen.failures[late.request_id], DeadlineExceeded)
    assert rig.seen.tokens[late.request_id] == expected_tokens(prompt_of(5), 100)[:4]
    assert rig.engine.next_deadline() is None
    check_all(rig, [other])


def test_a_computed_prefill_outlives_its_deadline_because_its_peer_still_reads():
    clock = Clock()
    rig = make_rig(make_executor(clock), clock)
    request = make_request(prompt_of(9), prefill_only=True, deadline=clock.now + 5)
    rig.run(request)
    clock.now += 10
    assert rig.engine.next_deadline() is None
    rig.step()
    assert rig.seen.failures == {}
    rig.engine.free_prefill(request.request_id)
    rig.assert_nothing_held()


def test_requests_that_ended_are_not_kept_for_their_deadlines():
    clock = Clock()
    rig = make_rig(make_executor(clock), clock)
    for i in range(300):
        rig.run(make_request(prompt_of(3, salt=i), 1, deadline=clock.now + 1e6))
    assert len(rig.engine._requests._deadlines._heap) <= 65


# A device that fails.


class FailingExecutor(SimExecutor):
    """Raises at given calls."""

    fail_launch: frozenset[int] = frozenset()
    fail_collect: frozenset[int] = frozenset()
    error: Exception = RuntimeError("boom")

    def launch(self, plan: StepPlan) -> None:
        if plan.step in self.fail_launch:
            raise self.error
        super().launch(plan)

    def collect(self) -> StepResult:
        result = super().collect()
        if result.step in self.fail_collect:
            raise self.error
        return result


def make_failing_rig(depth: int) -> tuple[Rig, FailingExecutor]:
    executor = FailingExecutor(make_executor(depth=depth)._settings)
    return make_rig(executor), executor


@DEPTHS
@pytest.mark.parametrize("where", ["fail_launch", "fail_collect"])
def test_a_failed_step_fails_its_requests_and_no_others(where: str, depth: int):
    rig, executor = make_failing_rig(depth)
    setattr(executor, where, frozenset({3}))
    inside, later = make_request(prompt_of(9), 10), make_request(prompt_of(9, salt=1), 10)
    rig.submit(inside)
    while inside.request_id not in rig.seen.failures:
        rig.step()
    rig.submit(later)
    rig.drain()
    error = rig.seen.failures[inside.request_id]
    assert isinstance(error, InternalError)
    assert "step 3 failed" in error.message
    assert "boom" not in error.message
    check_all(rig, [later])
    assert rig.engine.counters().num_failed_steps == 1


def test_running_out_of_device_memory_is_a_lack_of_capacity():
    rig, executor = make_failing_rig(1)
    executor.fail_launch, executor.error = frozenset({1}), MemoryError()
    request = make_request(prompt_of(9))
    rig.run(request)
    assert isinstance(rig.seen.failures[request.request_id], NoCapacity)


def test_a_request_that_waits_for_a_failed_prefix_computes_it_itself():
    rig, executor = make_failing_rig(1)
    executor.fail_launch = frozenset({2})
    prompt = prompt_of(100)
    first, second = make_request(prompt, 3), make_request(prompt, 3)
    rig.run(first, second)
    assert first.request_id in rig.seen.failures
    check_all(rig, [second])
