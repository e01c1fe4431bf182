"""While several tenants use a worker, prompts fill no step: nobody waits for another tenant's long step."""

from __future__ import annotations

from support.engine.scheduler_rig import chunks, make_scheduler, place, run_step

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
