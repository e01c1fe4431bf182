"""The engine's part in a hand-over that it receives."""

from __future__ import annotations

import pytest
from support.engine.engine_harness import (
    BLOCK_SIZE,
    DEPTHS,
    Clock,
    check_all,
    expected_for,
    expected_tokens,
    make_executor,
    make_request,
    make_rig,
    prompt_of,
    receive,
    submit_remote,
    write_remote_kv,
)

from baton.rpc.errors import DeadlineExceeded
from baton.worker.core import FinishReason, TokenLogprobs


@DEPTHS
@pytest.mark.parametrize("length", [16, 17, 19, 40])
def test_a_remote_prefill_gives_the_same_tokens_without_computing_the_prompt(length: int, depth: int):
    rig = make_rig(make_executor(depth=depth))
    request = submit_remote(rig, prompt_of(length))
    assert not rig.engine.has_work()
    receive(rig, request)
    rig.engine.accept_first_token(request.request_id, expected_tokens(prompt_of(length), 1)[0])
    rig.step()
    assert len(rig.seen.tokens[request.request_id]) == 1
    rig.engine.finish_transfer(request.request_id)
    rig.drain()
    check_all(rig, [request])
    assert rig.seen.finishes[request.request_id].num_transferred_tokens == length
    again = make_request(prompt_of(length), 2)
    rig.run(again)
    assert rig.seen.finishes[again.request_id].num_cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_only_uncached_blocks_are_transferred():
    rig = make_rig()
    prompt = prompt_of(40)
    rig.run(make_request(prompt[:20], 2))
    request = submit_remote(rig, prompt)
    assert rig.seen.num_wanted[request.request_id] == 20
    assert len(rig.engine.block_ids(request.request_id)) == 5
    receive(rig, request)
    assert len(rig.engine.block_ids(request.request_id)) == 10
    rig.engine.finish_transfer(request.request_id)
    rig.drain()
    check_all(rig, [request])
    finish = rig.seen.finishes[request.request_id]
    assert (finish.num_cached_tokens, finish.num_transferred_tokens) == (20, 20)


def test_a_prompt_that_is_cached_enough_is_computed_here():
    rig = make_rig(min_remote_prefill_tokens=8)
    prompt = prompt_of(24)
    rig.run(make_request(prompt))
    request = make_request([*prompt, 9, 9], remote_prefill=True)
    rig.run(request)
    assert request.request_id not in rig.seen.num_wanted
    check_all(rig, [request])


def test_a_finished_transfer_without_a_first_token_computes_it_here():
    rig = make_rig()
    request = submit_remote(rig, prompt_of(18))
    receive(rig, request)
    rig.engine.finish_transfer(request.request_id)
    rig.step()
    rig.engine.accept_first_token(request.request_id, 4000)
    rig.drain()
    check_all(rig, [request])


@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("reserved", [False, True])
def test_a_remote_prefill_that_fails_is_computed_here(accepted: bool, reserved: bool):
    rig = make_rig()
    prompt = prompt_of(22)
    request = submit_remote(rig, prompt)
    if reserved:
        assert rig.engine.reserve_blocks(request.request_id) is not None
    if accepted:
        rig.engine.accept_first_token(request.request_id, expected_tokens(prompt, 1)[0])
    rig.engine.prefill_locally(request.request_id)
    rig.drain()
    check_all(rig, [request])
    assert rig.engine.counters().num_local_fallbacks == 1


@pytest.mark.parametrize("reserved", [False, True])
@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("good", [False, True])
def test_an_abort_in_a_remote_prefill_keeps_the_lease_until_its_end(reserved: bool, accepted: bool, good: bool):
    rig = make_rig()
    prompt = prompt_of(22)
    request = submit_remote(rig, prompt)
    if reserved:
        receive(rig, request)
    if accepted:
        rig.engine.accept_first_token(request.request_id, 77)
    rig.engine.abort(request.request_id)
    rig.step()
    assert rig.seen.finishes[request.request_id].reason is FinishReason.ABORT
    assert rig.engine.audit().num_leased_blocks == (6 if reserved else 0)
    rig.engine.accept_first_token(request.request_id, 78)
    rig.step()
    if good:
        rig.engine.finish_transfer(request.request_id)
    else:
        rig.engine.free_lease(request.request_id)
    rig.engine.free_lease(request.request_id)
    rig.engine.prefill_locally(request.request_id)
    rig.assert_nothing_held()
    assert rig.engine.audit().num_cached_blocks == (5 if reserved and good else 0)
    after = make_request(prompt, 5)
    rig.run(after)
    check_all(rig, [after])


@DEPTHS
def test_a_step_in_flight_cannot_write_into_a_lease(depth: int):
    rig = make_rig(make_executor(depth=depth))
    remote = submit_remote(rig, prompt_of(40))
    local = make_request(prompt_of(60, salt=1), 50)
    rig.submit(local)
    rig.step()
    rig.engine.abort(local.request_id)
    receive(rig, remote)
    rig.engine.finish_transfer(remote.request_id)
    rig.drain()
    check_all(rig, [remote])


def test_a_first_token_may_finish_the_request_before_its_transfer():
    rig = make_rig()
    prompt = prompt_of(18)
    request = submit_remote(rig, prompt, max_tokens=1)
    receive(rig, request)
    logprobs = TokenLogprobs(-0.5, 1, (), ())
    rig.engine.accept_first_token(request.request_id, expected_tokens(prompt, 1)[0], logprobs)
    outputs = rig.step()
    assert outputs.logprobs == {0: logprobs}
    assert outputs.finishes[0].reason is FinishReason.LENGTH
    assert rig.engine.audit().num_leased_blocks == 5
    rig.engine.finish_transfer(request.request_id)
    check_all(rig, [request])


def test_an_abort_after_the_transfer_frees_everything():
    rig = make_rig()
    request = submit_remote(rig, prompt_of(18))
    receive(rig, request)
    rig.engine.finish_transfer(request.request_id)
    rig.engine.abort(request.request_id)
    rig.drain()
    rig.assert_nothing_held()


def test_a_deadline_in_a_remote_prefill_keeps_the_lease_until_its_end():
    clock = Clock()
    rig = make_rig(clock=clock)
    request = submit_remote(rig, prompt_of(18), deadline=clock.now + 1)
    receive(rig, request)
    clock.now += 2
    rig.step()
    assert isinstance(rig.seen.failures[request.request_id], DeadlineExceeded)
    assert rig.engine.audit().num_leased_blocks == 5
    rig.engine.free_lease(request.request_id)
    rig.assert_nothing_held()


def test_a_burst_of_remote_prefills_with_one_prefix_transfers_it_once():
    rig = make_rig()
    prompt = prompt_of(40)
    requests = [make_request([*prompt, 60 + i], 4, remote_prefill=True) for i in range(4)]
    rig.submit(*requests)
    rig.step()
    assert list(rig.seen.num_wanted) == [requests[0].request_id]
    assert rig.engine.load().queue_depth == 4
    receive(rig, requests[0])
    rig.engine.finish_transfer(requests[0].request_id)
    rig.drain()
    check_all(rig, requests)


def test_after_a_failed_remote_prefill_a_waiting_request_begins_its_own():
    rig = make_rig()
    prompt = prompt_of(40)
    first, second = (make_request(prompt, 4, remote_prefill=True) for _ in range(2))
    rig.submit(first, second)
    rig.step()
    rig.engine.abort(first.request_id)
    rig.step()
    assert second.request_id in rig.seen.num_wanted
    receive(rig, second)
    rig.engine.finish_transfer(second.request_id)
    rig.drain()
    check_all(rig, [second])


def test_a_local_request_does_not_wait_for_a_remote_prefill():
    rig = make_rig()
    prompt = prompt_of(40)
    remote = submit_remote(rig, prompt)
    local = make_request(prompt, 4)
    rig.run(local)
    check_local = rig.seen.tokens[local.request_id]
    assert check_local == expected_for(local)
    receive(rig, remote)
    rig.engine.finish_transfer(remote.request_id)
    rig.drain()
    check_all(rig, [remote])


def test_leases_leave_blocks_for_all_running_requests():
    rig = make_rig(make_executor(num_blocks=20))
    running = [make_request(prompt_of(8, salt=i), 32) for i in range(3)]
    rig.submit(*running)
    rig.step()
    small, large = submit_remote(rig, prompt_of(32, salt=8)), submit_remote(rig, prompt_of(44, salt=9))
    assert rig.engine.reserve_blocks(large.request_id) is None
    assert rig.engine.reserve_blocks(small.request_id) is not None
    rig.drain()
    for request in running:
        assert rig.seen.tokens[request.request_id] == expected_for(request)
    assert rig.engine.audit().num_leased_blocks == 8
    write_remote_kv(rig.executor, small.token_ids, 0, rig.engine.block_ids(small.request_id))
    rig.engine.finish_transfer(small.request_id)
    rig.engine.prefill_locally(large.request_id)
    rig.drain()
    check_all(rig, [*running, small, large])


def test_a_request_that_waits_for_leases_to_end_is_not_overtaken_by_new_ones():
    rig = make_rig(make_executor(num_blocks=16))
    first = submit_remote(rig, prompt_of(30))
    receive(rig, first)
    big = make_request(prompt_of(50, salt=1), 10)
    rig.submit(big)
    rig.drain()
    second = submit_remote(rig, prompt_of(20, salt=2))
    assert rig.engine.reserve_blocks(second.request_id) is None
    rig.engine.finish_transfer(first.request_id)
    rig.engine.prefill_locally(second.request_id)
    rig.drain()
    check_all(rig, [first, big, second])


def test_failed_attempts_to_admit_are_no_work_for_the_engine():
    rig = make_rig(make_executor(num_blocks=16))
    first = submit_remote(rig, prompt_of(30))
    receive(rig, first)
    big = make_request(prompt_of(50, salt=1), 10)
    rig.submit(big)
    rig.drain()
    urgent = submit_remote(rig, prompt_of(50, salt=2), priority=-1)
    rig.drain()
    assert rig.engine.reserve_blocks(urgent.request_id) is None
    assert not rig.engine.has_work(), "it would be asked, and step, without end"
    rig.engine.finish_transfer(first.request_id)
    rig.engine.prefill_locally(urgent.request_id)
    rig.drain()
    check_all(rig, [first, big, urgent])


def test_a_transferred_prompt_runs_before_requests_that_wait_for_its_blocks():
    rig = make_rig(make_executor(num_blocks=16, max_num_requests=1), max_num_requests=1)
    remote = submit_remote(rig, prompt_of(40), priority=2)
    receive(rig, remote)
    big = make_request(prompt_of(36, salt=1), 20)
    rig.submit(big)
    rig.drain()
    assert rig.seen.tokens == {}
    rig.engine.finish_transfer(remote.request_id)
    rig.drain()
    check_all(rig, [remote, big])
