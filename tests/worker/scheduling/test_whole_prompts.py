"""Where nothing is cached, steps hold whole prompts, and tenants take turns."""

from __future__ import annotations

from collections.abc import Sequence

from support.engine.engine_harness import BLOCK_SIZE, make_request, prompt_of

from baton.worker.requests.outputs import EngineCounters
from baton.worker.requests.state import RequestState
from baton.worker.scheduling.scheduler import Scheduler
from baton.worker.scheduling.settings import EngineSettings


def make_scheduler(**values: int) -> Scheduler:
    settings = EngineSettings(
        **{"max_num_requests": 8, "max_num_batched_tokens": 16, "max_shared_prefill_tokens": 0, **values}
    )
    return Scheduler(0, BLOCK_SIZE, 1000, settings, EngineCounters(), lambda: 0.0, whole_prompts=True)


def add(scheduler: Scheduler, lengths: Sequence[int], tenant: str = "", priority: int = 0) -> list[RequestState]:
    states = []
    for index, length in enumerate(lengths):
        request = make_request(prompt_of(length, salt=index), 1, priority=priority, tenant=tenant)
        state = RequestState(request, (priority, 0.0, index), length + 1, frozenset(), 0.0, caching=False)
        scheduler.place(state)
        states.append(state)
    return states


def steps_of(scheduler: Scheduler) -> list[list[RequestState]]:
    """Runs all requests. Returns those of each step."""
    steps = []
    while (scheduled := scheduler.schedule()) is not None:
        assert scheduled.plan.samples.all()
        assert not scheduled.plan.new_blocks
        assert scheduled.plan.num_scheduled_tokens.tolist() == [len(state.token_ids) for state in scheduled.states]
        steps.append(scheduled.states)
        scheduler.collected(scheduled.plan.step)
        for state in scheduled.states:
            scheduler.retire(state)
    return steps


def test_prompts_fill_a_step_until_one_does_not_fit() -> None:
    scheduler = make_scheduler()
    one, two, three, four = add(scheduler, [6, 9, 5, 4])
    assert steps_of(scheduler) == [[one, two], [three, four]]


def test_a_prompt_longer_than_a_step_is_alone_in_one() -> None:
    scheduler = make_scheduler()
    one, two, three = add(scheduler, [5, 40, 5])
    assert steps_of(scheduler) == [[one], [two], [three]]


def test_rows_limit_a_step() -> None:
    scheduler = make_scheduler(max_num_requests=2)
    assert [len(step) for step in steps_of_short(scheduler, 5)] == [2, 2, 1]


def steps_of_short(scheduler: Scheduler, count: int) -> list[list[RequestState]]:
    add(scheduler, [2] * count)
    return steps_of(scheduler)


def test_tenants_take_turns_by_the_tokens_that_they_have_used() -> None:
    scheduler = make_scheduler()
    many = add(scheduler, [8] * 6, tenant="many")
    few = add(scheduler, [8] * 2, tenant="few")
    steps = steps_of(scheduler)
    assert [set(step) for step in steps[:2]] == [{many[0], few[0]}, {many[1], few[1]}]


def test_shared_steps_are_short_and_always_hold_one_prompt() -> None:
    scheduler = make_scheduler(max_shared_prefill_tokens=4)
    add(scheduler, [8, 8], tenant="one")
    add(scheduler, [8], tenant="other")
    assert [len(step) for step in steps_of(scheduler)] == [1, 1, 1]


def test_urgent_prompts_come_first() -> None:
    scheduler = make_scheduler(max_background_prefill_tokens=0)
    behind = add(scheduler, [10], priority=1)
    urgent = add(scheduler, [10])
    assert steps_of(scheduler) == [urgent, behind]
