"""Background requests stay small while urgent ones use the worker, and fill it while they are alone."""

from __future__ import annotations

import pytest
from support.engine.rigs.scheduler_rig import chunks, make_scheduler, place, run_step

BUDGET = 32
LIMIT = 4


def scheduler_of(limit=LIMIT, **options):
    return make_scheduler(
        1000, max_num_requests=16, max_num_batched_tokens=BUDGET, max_background_prefill_tokens=limit, **options
    )


def test_alone_they_fill_the_steps():
    scheduler = scheduler_of()
    batch = place(scheduler, 100, priority=1000)
    assert chunks(run_step(scheduler)) == {batch: BUDGET}


def test_beside_an_urgent_request_they_get_few_tokens_whatever_the_tenant():
    for tenant in ("a", "b"):
        scheduler = scheduler_of()
        batch = place(scheduler, 100, tenant=tenant, priority=1000)
        run_step(scheduler)
        urgent = place(scheduler, 40, tenant="a")
        first = chunks(run_step(scheduler))
        assert first[urgent] >= BUDGET - LIMIT
        assert first.get(batch, 0) <= LIMIT
        assert chunks(run_step(scheduler)) == {urgent: 40 - first[urgent]}
        assert chunks(run_step(scheduler)) == {urgent: 1, batch: LIMIT}


def test_the_urgent_request_is_not_limited_by_another_tenant_in_the_background():
    scheduler = scheduler_of(max_shared_prefill_tokens=8)
    place(scheduler, 100, tenant="batch", priority=1000)
    urgent = place(scheduler, BUDGET, tenant="a")
    assert chunks(run_step(scheduler)) == {urgent: BUDGET}


def test_two_tenants_in_the_background_share_as_others_do():
    scheduler = scheduler_of(max_shared_prefill_tokens=8)
    for tenant in ("a", "b"):
        place(scheduler, 100, tenant=tenant, priority=1000)
    assert run_step(scheduler).num_prefill_tokens == 8


def test_an_urgent_request_counts_until_it_is_forgotten():
    now = [0.0]
    scheduler = scheduler_of(clock=lambda: now[0])
    scheduler.retire(place(scheduler, 2))
    batch = place(scheduler, 100, priority=1)
    now[0] = 9.0
    assert chunks(run_step(scheduler)) == {batch: LIMIT}
    now[0] = 10.5
    assert chunks(run_step(scheduler)) == {batch: BUDGET}


def test_they_get_an_eighth_of_the_rows_beside_urgent_ones():
    scheduler = scheduler_of(limit=BUDGET)
    place(scheduler, 1)
    many = [place(scheduler, 1, priority=1) for _ in range(6)]
    for _ in range(4):
        run_step(scheduler)
    assert [state for state in many if state.row >= 0] == many[:2]
    urgent = [place(scheduler, 1) for _ in range(4)]
    run_step(scheduler)
    assert all(state.row >= 0 for state in urgent)
    scheduler.retire(many[0])
    run_step(scheduler)
    assert [state for state in many[1:] if state.row >= 0] == many[1:3]


def test_one_of_them_begins_in_a_step_beside_urgent_ones():
    scheduler = scheduler_of()
    place(scheduler, 1)
    run_step(scheduler)
    many = [place(scheduler, 1, priority=1) for _ in range(2)]
    run_step(scheduler)
    assert [state for state in many if state.row >= 0] == many[:1]
    run_step(scheduler)
    assert [state for state in many if state.row >= 0] == many


def test_one_of_eight_steps_with_urgent_prompts_has_background_tokens_so_that_none_waits_for_ever():
    scheduler = scheduler_of(long_prefill_token_threshold=8)
    batch = place(scheduler, 100, priority=1000)
    run_step(scheduler)
    urgent = place(scheduler, 100)
    steps = [chunks(run_step(scheduler)) for _ in range(10)]
    assert [step[urgent] for step in steps] == [8] * 10
    assert [step.get(batch, 0) for step in steps] == [LIMIT, 0, 0, 0, 0, 0, 0, 0, LIMIT, 0]


@pytest.mark.parametrize("priority", [0, -3])
def test_requests_of_the_usual_priority_are_urgent(priority):
    scheduler = scheduler_of()
    place(scheduler, 1)
    other = place(scheduler, 20, priority=priority)
    assert chunks(run_step(scheduler))[other] == 20


def test_no_limit_holds_nothing_back():
    scheduler = scheduler_of(limit=0)
    place(scheduler, 2)
    batch = place(scheduler, 100, priority=1000)
    assert chunks(run_step(scheduler))[batch] == BUDGET - 2
