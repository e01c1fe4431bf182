"""While several tenants use a worker, prompts fill no step: nobody waits for another tenant's long step."""

from __future__ import annotations

from support.engine.rigs.scheduler_rig import chunks, make_scheduler, place, run_step

LIMIT = 8
BUDGET = 16


def scheduler_of(limit=LIMIT, **options):
    return make_scheduler(1000, max_num_requests=16, max_shared_prefill_tokens=limit, **options)


def end(scheduler, state):
    scheduler.retire(state)


def test_one_tenant_fills_its_steps():
    scheduler = scheduler_of()
    long = place(scheduler, 100, tenant="a")
    assert chunks(run_step(scheduler)) == {long: BUDGET}


def test_another_tenants_decode_shortens_them():
    scheduler = scheduler_of()
    other = place(scheduler, 2, tenant="b")
    run_step(scheduler)
    long = place(scheduler, 100, tenant="a")
    scheduled = run_step(scheduler)
    assert chunks(scheduled) == {other: 1, long: LIMIT}


def test_a_tenant_that_was_there_a_moment_ago_shortens_them_until_it_is_forgotten():
    now = [0.0]
    scheduler = scheduler_of(clock=lambda: now[0])
    end(scheduler, place(scheduler, 2, tenant="b"))
    now[0] = 9.0
    long = place(scheduler, 100, tenant="a")
    assert chunks(run_step(scheduler)) == {long: LIMIT}
    now[0] = 10.5
    assert chunks(run_step(scheduler)) == {long: BUDGET}


def test_a_waiting_tenant_shortens_them():
    now = [0.0]
    scheduler = scheduler_of(clock=lambda: now[0])
    long = place(scheduler, 100, tenant="a")
    waiting = place(scheduler, 100, tenant="b")
    now[0] = 60.0
    assert chunks(run_step(scheduler)) == {long: LIMIT // 2, waiting: LIMIT // 2}


def test_no_limit_shortens_nothing():
    scheduler = scheduler_of(limit=0)
    place(scheduler, 100, tenant="a")
    place(scheduler, 100, tenant="b")
    assert run_step(scheduler).num_prefill_tokens == BUDGET


def test_decodes_are_not_counted():
    scheduler = scheduler_of()
    for number in range(10):
        place(scheduler, 1, tenant=f"t{number}")
    while scheduler.queues.num_queued:
        run_step(scheduler)
    long = place(scheduler, 100, tenant="a")
    scheduled = run_step(scheduler)
    assert chunks(scheduled)[long] == BUDGET - 10
    assert scheduled.num_prefill_tokens == BUDGET - 10


def beside_a_long_prompt(scheduler):
    long = place(scheduler, 1000, tenant="a")
    place(scheduler, 1000, tenant="a")
    place(scheduler, 1, tenant="b")
    run_step(scheduler)
    run_step(scheduler)
    return long


def test_a_tenants_only_short_prompt_is_computed_beside_as_many_tokens_of_another():
    scheduler = scheduler_of(64, max_num_batched_tokens=512)
    long = beside_a_long_prompt(scheduler)
    short = place(scheduler, 10, tenant="c")
    assert run_step_prompts(scheduler) == {short: 10, long: 10}
    assert run_step_prompts(scheduler) == {long: 64}


def test_a_step_for_a_tiny_prompt_holds_an_eighth_of_the_limit():
    scheduler = scheduler_of(64, max_num_batched_tokens=512)
    long = beside_a_long_prompt(scheduler)
    tiny = place(scheduler, 2, tenant="c")
    assert run_step_prompts(scheduler) == {tiny: 2, long: 6}


def test_only_prompts_of_several_tenants_are_computed_in_one_short_step():
    scheduler = scheduler_of(64, max_num_batched_tokens=512)
    long = beside_a_long_prompt(scheduler)
    short = [place(scheduler, 10, tenant=tenant) for tenant in "cd"]
    assert run_step_prompts(scheduler) == {short[0]: 10, short[1]: 10, long: 10}


def test_a_prompt_longer_than_an_even_part_shortens_no_step():
    scheduler = scheduler_of(64, max_num_batched_tokens=512)
    long = beside_a_long_prompt(scheduler)
    other = place(scheduler, 33, tenant="c")
    assert run_step_prompts(scheduler) == {other: 32, long: 32}


def test_a_tenant_with_several_prompts_shortens_no_step():
    scheduler = scheduler_of(64, max_num_batched_tokens=512)
    beside_a_long_prompt(scheduler)
    for _ in range(2):
        place(scheduler, 10, tenant="c")
    assert sum(run_step_prompts(scheduler).values()) == 64


def test_of_two_steps_in_a_row_one_at_most_is_shortened():
    scheduler = scheduler_of(64, max_num_batched_tokens=512)
    long = beside_a_long_prompt(scheduler)
    given = []
    for number in range(6):
        place(scheduler, 10, tenant=f"t{number}")
        given.append(run_step_prompts(scheduler)[long])
    assert given == [10, 54] * 3


def run_step_prompts(scheduler):
    """Runs a step. Returns the tokens of its prompts."""
    prefilling = {*scheduler.batch.prefilling, *scheduler.queues.waiting}
    return {state: tokens for state, tokens in chunks(run_step(scheduler)).items() if state in prefilling}
