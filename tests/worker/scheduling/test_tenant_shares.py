"""Tenants share the prompt tokens of steps: bounded waits, full steps, and the plain order for one tenant."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.rigs.scheduler_rig import chunks, make_scheduler, place, run_step

from baton.worker.requests.state import NO_ROW, Phase
from baton.worker.scheduling.tenants.shares import TenantClock

BUDGET = 16


def by_tenant(scheduled):
    used = {}
    for state, tokens in chunks(scheduled).items():
        used[state.request.tenant] = used.get(state.request.tenant, 0) + tokens
    return used


def test_a_short_prompt_starts_in_the_next_step_behind_200_k_tokens_of_another_tenant():
    scheduler = make_scheduler(60_000, max_num_batched_tokens=512, max_num_requests=64, max_shared_prefill_tokens=512)
    for _ in range(20):
        place(scheduler, 10_000, tenant="attacker")
    for _ in range(5):
        run_step(scheduler)
    short = place(scheduler, 30, tenant="neighbour")
    scheduled = run_step(scheduler)
    assert chunks(scheduled)[short] == 30
    assert scheduled.num_prefill_tokens == 512


def test_a_long_prompt_gets_half_of_each_step_beside_another_tenants_many():
    scheduler = make_scheduler(1000, max_num_requests=64)
    for _ in range(10):
        place(scheduler, 100, tenant="a")
    run_step(scheduler)
    long = place(scheduler, 100, tenant="b")
    for _ in range(5):
        assert chunks(run_step(scheduler))[long] == BUDGET // 2


def test_one_tenant_is_served_by_rank_as_if_there_were_no_tenants():
    scheduler = make_scheduler(1000)
    first, second = place(scheduler, 20, tenant="a"), place(scheduler, 20, tenant="a")
    assert chunks(run_step(scheduler)) == {first: 16}
    assert chunks(run_step(scheduler)) == {first: 4, second: 12}


def test_the_order_within_a_tenant_is_that_of_ranks():
    scheduler = make_scheduler(1000)
    mine = [place(scheduler, 12, tenant="a") for _ in range(3)]
    for _ in range(3):
        place(scheduler, 12, tenant="b")
    begun = []
    for _ in range(8):
        begun += [state for state in chunks(run_step(scheduler)) if state in mine and state not in begun]
    assert begun == mine


def test_priorities_stay_above_tenants():
    scheduler = make_scheduler(1000)
    place(scheduler, 100, tenant="a", priority=1)
    urgent = place(scheduler, 40, tenant="b")
    assert chunks(run_step(scheduler)) == {urgent: 16}


def test_many_tenants_take_turns_of_whole_chunks():
    scheduler = make_scheduler(1000, max_num_requests=64)
    states = [place(scheduler, 8, tenant=f"t{number}") for number in range(12)]
    seen = []
    for _ in range(8):
        given = {state: tokens for state, tokens in chunks(run_step(scheduler)).items() if tokens > 1}
        assert len(given) <= 5
        seen += given
    assert set(seen) == set(states)


def test_another_tenant_passes_a_prompt_without_capacity_until_it_used_as_much():
    scheduler = make_scheduler(16, max_num_batched_tokens=64)
    holder = place(scheduler, 30, tenant="a", max_tokens=2)  # more than half of the pool
    run_step(scheduler)
    large = place(scheduler, 40, tenant="a")
    passing = []
    assert large.phase is Phase.WAITING
    for _ in range(12):
        passing.append(place(scheduler, 8, tenant="b", max_tokens=1))
        scheduled = scheduler.schedule()
        if scheduled is None or passing[-1] not in scheduled.states:
            break
        scheduler.collected(scheduled.plan.step)
        for state in scheduled.states:
            if state.request.tenant == "b":
                scheduler.retire(state)
    # As long as `holder` stays, `large` finds no room: others used 40 tokens by then, and no more.
    assert holder.row != NO_ROW
    assert len(passing) - 1 == 5
    scheduler.retire(holder)
    scheduler.collected(scheduler._step)
    scheduler.queues.stalled = False
    assert large in scheduler.schedule().states


def test_a_decode_without_a_block_takes_it_from_the_tenant_that_holds_most():
    scheduler = make_scheduler(12)
    attackers = [place(scheduler, 15, tenant="a") for _ in range(2)]
    run_step(scheduler)
    run_step(scheduler)
    neighbour = place(scheduler, 3, tenant="b")
    for _ in range(60):
        if any(state.num_preemptions for state in [*attackers, neighbour]):
            break
        run_step(scheduler)
    assert attackers[1].num_preemptions == 1
    assert neighbour.num_preemptions == attackers[0].num_preemptions == 0


def test_a_prompt_continues_although_a_more_urgent_one_does_not_fit():
    scheduler = make_scheduler(16)
    running = place(scheduler, 40, tenant="a", priority=1, prefill_only=True)
    assert chunks(run_step(scheduler)) == {running: 16}
    urgent = place(scheduler, 40, tenant="b")
    assert chunks(run_step(scheduler)) == {running: 16}
    assert chunks(run_step(scheduler)) == {running: 8}
    assert urgent.phase is Phase.WAITING


def test_a_returning_tenant_has_no_saved_share():
    clock = TenantClock()
    clock.advance(["a", "b"])
    clock.charge("a", 100)
    clock.advance(["a"])
    clock.charge("a", 100)
    clock.advance(["a", "b"])
    assert clock.used("b") == 100
    assert clock.used("a") == 200
    clock.advance(["b"])
    clock.charge("b", 500)
    clock.advance(["b"])
    assert len(clock) <= 1


prompts = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.integers(0, 12)), min_size=1, max_size=25)


@settings(max_examples=150, deadline=None)
@given(prompts, st.integers(4, 20), st.integers(1, 8))
def test_no_step_leaves_tokens_and_no_tenant_waits_for_more_than_its_share(arriving, budget, num_rows):
    num_rows = min(num_rows, budget)
    scheduler = make_scheduler(2000, max_num_batched_tokens=budget, max_num_requests=num_rows)
    states, step = [], 0
    arriving = sorted(arriving, key=lambda one: one[2])
    while True:
        while arriving and arriving[0][2] <= step:
            tenant, length, _ = arriving.pop(0)
            states.append(place(scheduler, length, tenant=tenant, max_tokens=1))
        waiting = [state for state in states if state.phase in (Phase.WAITING, Phase.RUNNING)]
        if not waiting and not arriving:
            break
        step += 1
        assert step < 2000, "a prompt starves"
        left = {state: len(state.token_ids) - computed_of(scheduler, state) for state in waiting}
        rows = scheduler.batch.num_free_rows
        scheduled = scheduler.schedule()
        if scheduled is None:
            assert not waiting
            continue
        given = chunks(scheduled)
        # Work conserving: all that fits into the step and the rows is computed.
        running = [state for state in waiting if state.row != NO_ROW]
        if len(running) < len(waiting) and rows > len(given):
            assert sum(given.values()) == budget
        assert sum(given.values()) == min(budget, sum(left[state] for state in running)) or rows == 0
        tenants = {state.request.tenant for state in running}
        for tenant in tenants:
            mine = sum(left[state] for state in running if state.request.tenant == tenant)
            used = sum(tokens for state, tokens in given.items() if state.request.tenant == tenant)
            assert used >= min(mine, budget // len(tenants) - 1) or len(running) == num_rows
        scheduler.collected(scheduled.plan.step)
        scheduler.commit(scheduled)
        for state, sampled in zip(scheduled.states, scheduled.plan.samples, strict=True):
            if sampled:
                state.token_ids.append(7)
                scheduler.retire(state)
    scheduler.check_integrity([])


def computed_of(scheduler, state):
    return 0 if state.row == NO_ROW else int(scheduler.batch.num_computed[state.row])


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_a_tenant_with_one_prompt_waits_for_one_of_each_other_where_rows_are_few(num_rows):
    scheduler = make_scheduler(2000, max_num_batched_tokens=16, max_num_requests=num_rows)
    for _ in range(30):
        place(scheduler, 64, tenant="a", max_tokens=1)
    retire_sampled(scheduler, run_step(scheduler))
    short = place(scheduler, 8, tenant="b", max_tokens=1)
    num_steps = 0
    while short.phase is Phase.WAITING:
        retire_sampled(scheduler, run_step(scheduler))
        num_steps += 1
    assert num_steps <= -(-64 * num_rows // 16) + 1


def retire_sampled(scheduler, scheduled):
    for state, sampled in zip(scheduled.states, scheduled.plan.samples, strict=True):
        if sampled:
            scheduler.retire(state)
