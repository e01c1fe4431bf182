from __future__ import annotations

import numpy as np
from support.engine.engine_harness import BLOCK_SIZE, NAMESPACE, make_request, prompt_of
from support.engine.rigs.scheduler_rig import ORDER, chunks, finish_step, make_scheduler, place, run_step

from baton.worker.requests.outputs import EngineCounters
from baton.worker.requests.state import NO_ROW, Phase, RequestState
from baton.worker.scheduling.scheduler import Scheduler
from baton.worker.scheduling.settings import EngineSettings


def test_decodes_come_first_and_prefill_takes_the_rest_of_the_budget():
    scheduler = make_scheduler()
    decoding = [place(scheduler, 2), place(scheduler, 2)]
    run_step(scheduler)
    long = place(scheduler, 40)
    scheduled = run_step(scheduler)
    assert chunks(scheduled) == {decoding[0]: 1, decoding[1]: 1, long: 14}
    assert scheduled.plan.num_decodes == 2
    assert scheduled.num_prefill_tokens == 14
    assert scheduled.plan.samples.tolist() == [True, True, False]


def test_a_step_never_passes_its_token_budget():
    scheduler = make_scheduler()
    for length in (30, 5, 50, 1, 9):
        place(scheduler, length)
    for _ in range(12):
        assert run_step(scheduler).plan.num_tokens <= 16


def test_a_started_prefill_continues_before_new_ones():
    scheduler = make_scheduler()
    first, second = place(scheduler, 20), place(scheduler, 20)
    assert chunks(run_step(scheduler)) == {first: 16}
    assert chunks(run_step(scheduler)) == {first: 4, second: 12}


def test_priority_goes_before_arrival():
    scheduler = make_scheduler()
    low, high = place(scheduler, 20, priority=1), place(scheduler, 20, priority=-1)
    assert chunks(run_step(scheduler)) == {high: 16}
    assert low.phase is Phase.WAITING


def test_the_batch_never_has_more_rows_than_allowed():
    scheduler = make_scheduler(max_num_requests=3, max_num_batched_tokens=64)
    states = [place(scheduler, 4) for _ in range(5)]
    scheduled = run_step(scheduler)
    assert len(scheduled.states) == 3
    scheduler.retire(states[1])
    assert states[3] in run_step(scheduler).states


def test_a_plan_is_a_difference_to_the_one_before():
    scheduler = make_scheduler()
    state = place(scheduler, 6)
    plan = run_step(scheduler).plan
    assert [init.row for init in plan.admitted] == [state.row]
    assert plan.admitted[0].token_ids.tolist() == state.token_ids[:6]
    assert plan.new_blocks == [(state.row, state.block_ids)]
    plans = [run_step(scheduler).plan for _ in range(4)]
    assert [len(plan.admitted) for plan in plans] == [0] * 4
    assert [len(plan.new_blocks) for plan in plans] == [0, 0, 1, 0]
    assert [plan.num_computed_tokens.tolist() for plan in plans] == [[6], [7], [8], [9]]
    row = state.row
    scheduler.retire(state)
    other = place(scheduler, 3)
    plan = run_step(scheduler).plan
    assert plan.freed == [row]
    assert (plan.rows.dtype, plan.num_computed_tokens.dtype) == (np.int64, np.int32)
    assert other.row == row


def test_the_request_of_the_largest_rank_is_preempted():
    scheduler = make_scheduler(num_blocks=7)
    first, second, urgent = place(scheduler, 8), place(scheduler, 7), place(scheduler, 4, priority=-1)
    run_step(scheduler)
    while not any(state.num_preemptions for state in (first, second, urgent)):
        run_step(scheduler)
    assert second.row == NO_ROW
    assert second.block_ids == []
    assert first.row != NO_ROW
    assert urgent.row != NO_ROW


def test_more_urgent_requests_preempt_less_urgent_ones_to_get_in():
    scheduler = make_scheduler(num_blocks=6)
    low = place(scheduler, 16, priority=1)
    run_step(scheduler)
    equal = place(scheduler, 12, priority=1)
    run_step(scheduler)
    assert equal.phase is Phase.WAITING
    high = place(scheduler, 12, priority=0)
    assert high in run_step(scheduler).states
    assert low.phase is Phase.WAITING


def test_a_preempted_request_finds_its_own_blocks_again():
    scheduler = make_scheduler(num_blocks=20, max_num_requests=1)
    low = place(scheduler, 16, priority=1)
    run_step(scheduler)
    high = place(scheduler, 8, priority=0)
    run_step(scheduler)
    scheduler.retire(high)
    assert chunks(run_step(scheduler)) == {low: 1}


def test_a_long_prompt_at_the_front_is_not_overtaken():
    scheduler = make_scheduler(num_blocks=10, max_num_batched_tokens=64)
    place(scheduler, 20)
    run_step(scheduler)
    long, short = place(scheduler, 24), place(scheduler, 2)
    run_step(scheduler)
    assert long.phase is short.phase is Phase.WAITING


def test_no_token_is_computed_twice_past_its_limit():
    scheduler = make_scheduler()
    state = place(scheduler, 5, max_tokens=3)
    steps = []
    while (scheduled := scheduler.schedule()) is not None:
        steps.append(scheduled)
    assert [chunks(step)[state] for step in steps] == [5, 1, 1]
    assert scheduler.batch.num_computed[state.row] == 7


def test_blocks_of_a_step_in_flight_are_not_free_before_it_is_collected():
    scheduler = make_scheduler()
    state = place(scheduler, 8)
    scheduled = scheduler.schedule()
    assert scheduled is not None
    scheduler.retire(state)
    assert scheduler.pool.num_free == 62
    scheduler.check_integrity([])
    scheduler.collected(scheduled.plan.step)
    assert scheduler.pool.num_free == 64


def test_leases_wait_until_steps_in_flight_no_longer_write_preempted_blocks():
    scheduler = make_scheduler(num_blocks=12, max_num_requests=1, min_remote_prefill_tokens=1)
    low = place(scheduler, 8, priority=1, max_tokens=8)
    in_flight = scheduler.schedule()
    assert in_flight is not None
    high = place(scheduler, 2, max_tokens=2)
    second = scheduler.schedule()
    assert second is not None
    assert low.phase is Phase.WAITING
    remote = place(scheduler, 3, max_tokens=2)
    scheduler.queues.waiting.discard(remote)
    remote.wants_remote = True
    scheduler.place(remote)
    assert remote.phase is Phase.REMOTE
    assert scheduler.reserve(remote) is None
    finish_step(scheduler, in_flight)
    assert scheduler.reserve(remote) is not None
    assert high.row != NO_ROW


def test_blocks_are_findable_only_when_they_are_computed():
    scheduler = make_scheduler()
    place(scheduler, 16)
    scheduled = scheduler.schedule()
    assert scheduled is not None
    assert scheduler.pool.cached_hashes() == b""
    finish_step(scheduler, scheduled)
    assert len(scheduler.pool.cached_hashes()) == 4 * 16


def test_a_request_that_waits_for_a_prefix_holds_no_blocks():
    scheduler = make_scheduler()
    first = place(scheduler, 40)
    run_step(scheduler)
    request = make_request(list(first.token_ids), cache_namespace=NAMESPACE)
    second = RequestState(request, (0, 1.0, next(ORDER)), 200, frozenset(), 0.0)
    second.hash_up_to(40, BLOCK_SIZE)
    scheduler.place(second)
    run_step(scheduler)
    last = scheduler.schedule()
    assert last is not None
    assert second.phase is Phase.PARKED
    assert second.block_ids == []
    assert scheduler.num_queued == 1
    finish_step(scheduler, last)
    assert second.phase is Phase.WAITING
    assert chunks(run_step(scheduler))[second] == 4


def test_without_work_the_schedule_stalls_until_a_change():
    scheduler = make_scheduler(num_blocks=10)
    pinned = place(scheduler, 20, prefill_only=True)
    scheduled = run_step(scheduler)
    scheduled = run_step(scheduler)
    assert scheduled.states == [pinned]
    scheduler.hold(pinned)
    place(scheduler, 24, max_tokens=4)
    assert scheduler.runnable()
    assert scheduler.schedule() is None
    assert not scheduler.runnable()
    scheduler.retire(pinned)
    assert scheduler.runnable()
    assert run_step(scheduler).num_prefill_tokens == 16


# Host memory.


def make_host_scheduler(num_blocks: int) -> Scheduler:
    settings = EngineSettings(max_num_requests=8, max_num_batched_tokens=64, min_host_hit_tokens=0)
    size = num_blocks * BLOCK_SIZE
    return Scheduler(num_blocks, BLOCK_SIZE, size, settings, EngineCounters(), lambda: 0.0, num_host_slots=32)


def put_in_host_memory(scheduler: Scheduler, state: RequestState) -> None:
    for block_hash in state.block_hashes:
        begun = scheduler.offloads.tier.begin(block_hash)
        assert begun is not None
        assert scheduler.offloads.tier.landed(begun.slots[0])


def place_with_prefix_in_host_memory(scheduler: Scheduler, length: int, priority: int = 0) -> RequestState:
    number = next(ORDER)
    request = make_request(prompt_of(length, salt=number), 4, priority=priority)
    state = RequestState(request, (priority, 0.0, number), length + 4, frozenset(), 0.0)
    state.hash_up_to(length, BLOCK_SIZE)
    put_in_host_memory(scheduler, state)
    scheduler.place(state)
    return state


def test_a_prefix_in_host_memory_is_awaited_without_a_row():
    scheduler = make_host_scheduler(32)
    state = place_with_prefix_in_host_memory(scheduler, 41)
    assert scheduler.schedule() is None
    assert state.phase is Phase.RESTORING
    assert (state.row, state.block_ids) == (NO_ROW, [])
    ((restore_id, copies, fenced),) = [(r.restore_id, r.copies, r.fenced) for r in scheduler.restores.take()]
    assert len(copies) == 10
    assert not fenced
    scheduler.check_integrity([state])
    assert scheduler.restore_ended(restore_id, landed=True) == 10
    assert run_step(scheduler).num_prefill_tokens == 1
    assert state.num_cached_tokens == 40
    scheduler.check_integrity([state])


def test_a_restore_that_failed_is_not_tried_again():
    scheduler = make_host_scheduler(32)
    state = place_with_prefix_in_host_memory(scheduler, 41)
    assert scheduler.schedule() is None
    (restore,) = scheduler.restores.take()
    scheduler.restore_ended(restore.restore_id, landed=False)
    assert run_step(scheduler).num_prefill_tokens == 41
    assert state.num_cached_tokens == 0


def test_a_restore_into_blocks_that_a_step_in_flight_may_write_is_behind_it():
    scheduler = make_host_scheduler(12)
    low = place(scheduler, 40, max_tokens=4, priority=1)
    in_flight = scheduler.schedule()
    assert in_flight is not None
    high = place_with_prefix_in_host_memory(scheduler, 41, priority=0)
    scheduler.schedule()
    assert low.phase is Phase.WAITING
    assert high.phase is Phase.RESTORING
    (restore,) = scheduler.restores.take()
    assert restore.fenced
    finish_step(scheduler, in_flight)
    scheduler.restore_ended(restore.restore_id, landed=True)
    scheduler.check_integrity([low, high])


def test_a_prefix_that_does_not_fit_stays_in_host_memory():
    scheduler = make_host_scheduler(12)
    place(scheduler, 40, max_tokens=4)
    run_step(scheduler)
    state = place_with_prefix_in_host_memory(scheduler, 41)
    run_step(scheduler)
    assert state.phase is Phase.WAITING
    assert scheduler.restores.take() == []
