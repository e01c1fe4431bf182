from __future__ import annotations

import pytest
from engine_harness import (
    BLOCK_SIZE,
    Clock,
    Rig,
    expected_for,
    expected_tokens,
    make_executor,
    make_request,
    make_rig,
    prompt_of,
    write_remote_kv,
)

from baton.rpc.errors import DataLoss, DeadlineExceeded, InternalError, InvalidRequest, NoCapacity
from baton.worker.block_pool import RemovedEvent, StoredEvent
from baton.worker.core import FinishReason, Request, SamplingParams, StepPlan, StepResult, TokenLogprobs
from baton.worker.engine import EngineSettings
from baton.worker.executor.sim import SimExecutor, SimSpeed

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def check_all(rig: Rig, requests: list[Request]) -> None:
    """Every request got exactly the tokens that it gets alone, and nothing is left behind."""
    for request in requests:
        assert rig.seen.tokens[request.request_id] == expected_for(request)
        assert rig.seen.finishes[request.request_id].reason is FinishReason.LENGTH
    rig.assert_nothing_held()


# Equal output, whatever shares the batch.


@DEPTHS
def test_a_mixed_batch_gives_what_each_request_gives_alone(depth: int):
    rig = make_rig(make_executor(depth=depth))
    requests = [make_request(prompt_of(3 + 5 * i, salt=i), 5 + i) for i in range(12)]
    for request in requests:
        rig.submit(request)
        rig.step()
    rig.drain()
    check_all(rig, requests)


@DEPTHS
@pytest.mark.parametrize("budget", [1, 3, 4, 7, 64])
def test_chunk_boundaries_do_not_change_the_output(budget: int, depth: int):
    rig = make_rig(make_executor(depth=depth), max_num_batched_tokens=budget, max_num_requests=1)
    requests = [make_request(prompt_of(length, salt=length), 6) for length in (1, 4, 5, 23)]
    rig.run(*requests)
    check_all(rig, requests)


@DEPTHS
def test_a_prefix_hit_does_not_change_the_output(depth: int):
    rig = make_rig(make_executor(depth=depth))
    prompt = prompt_of(30)
    first = make_request(prompt, 6)
    longer = make_request([*prompt, 77, 78, 79], 6)
    rig.run(first)
    rig.run(longer)
    check_all(rig, [first, longer])
    assert rig.seen.finishes[longer.request_id].num_cached_tokens == 28


def test_a_full_prompt_hit_still_computes_the_last_token():
    rig = make_rig()
    prompt = prompt_of(8 * BLOCK_SIZE)
    first, second = make_request(prompt, 4), make_request(prompt, 4)
    rig.run(first)
    rig.run(second)
    check_all(rig, [first, second])
    assert rig.seen.finishes[second.request_id].num_cached_tokens == 7 * BLOCK_SIZE


def test_blocks_of_the_output_are_found_by_the_next_turn():
    rig = make_rig()
    prompt = prompt_of(10)
    (tokens,) = rig.run(make_request(prompt, 20))
    turn = make_request([*prompt, *tokens, 99], 5)
    rig.run(turn)
    assert rig.seen.finishes[turn.request_id].num_cached_tokens == 28
    assert rig.seen.tokens[turn.request_id] == expected_tokens([*prompt, *tokens, 99], 5)


def test_without_prefix_caching_nothing_is_found():
    rig = make_rig(prefix_caching=False)
    prompt = prompt_of(20)
    first, second = make_request(prompt, 4), make_request(prompt, 4)
    rig.run(first)
    rig.run(second)
    check_all(rig, [first, second])
    assert rig.seen.finishes[second.request_id].num_cached_tokens == 0
    assert rig.engine.take_events() == []


def test_other_namespaces_share_nothing():
    rig = make_rig()
    prompt = prompt_of(20)
    rig.run(make_request(prompt))
    other = make_request(prompt, cache_namespace=bytes(16))
    rig.run(other)
    assert rig.seen.finishes[other.request_id].num_cached_tokens == 0


@DEPTHS
def test_preemption_does_not_change_the_output(depth: int):
    rig = make_rig(make_executor(num_blocks=24, depth=depth))
    requests = [make_request(prompt_of(10, salt=i), 40, arrival=float(i)) for i in range(6)]
    rig.run(*requests)
    check_all(rig, requests)
    assert rig.engine.counters().num_preemptions > 0
    assert rig.seen.finishes[requests[0].request_id].num_preemptions == 0


@DEPTHS
def test_sampling_noise_depends_on_seed_and_position_only(depth: int):
    rig = make_rig(make_executor(num_blocks=30, depth=depth))
    requests = [
        make_request(prompt_of(9), 30, sampling=SamplingParams(temperature=0.8, seed=seed)) for seed in (1, 2, 1, 3)
    ]
    rig.run(*requests)
    check_all(rig, requests)


@DEPTHS
def test_a_resumed_request_goes_on_where_it_was(depth: int):
    prompt = prompt_of(13)
    whole = expected_tokens(prompt, 20, 0.9, 5)
    rig = make_rig(make_executor(depth=depth))
    sampling = SamplingParams(temperature=0.9, seed=5)
    request = make_request([*prompt, *whole[:7]], 20, num_prompt_tokens=13, sampling=sampling)
    assert rig.run(request) == [whole[7:]]


def test_a_request_resumed_after_its_last_token_only_finishes():
    rig = make_rig()
    at_length = make_request([*prompt_of(5), 8, 9], 2, num_prompt_tokens=5)
    at_eos = make_request([*prompt_of(5), 2], 9, num_prompt_tokens=5, eos_token_ids=frozenset({2}))
    assert rig.run(at_length, at_eos) == [[], []]
    assert rig.seen.finishes[at_length.request_id].reason is FinishReason.LENGTH
    assert rig.seen.finishes[at_eos.request_id].reason is FinishReason.STOP


# Stops.


@DEPTHS
def test_a_stop_token_ends_and_is_named(depth: int):
    prompt = prompt_of(6)
    tokens = expected_tokens(prompt, 10)
    index = next(i for i in range(2, 10) if tokens[i] not in tokens[:i])
    rig = make_rig(make_executor(depth=depth))
    request = make_request(prompt, 10, stop_token_ids=frozenset({tokens[index]}))
    assert rig.run(request) == [tokens[: index + 1]]
    finish = rig.seen.finishes[request.request_id]
    assert (finish.reason, finish.stop_token_id) == (FinishReason.STOP, tokens[index])
    assert rig.engine.counters().num_discarded_tokens == depth - 1
    rig.assert_nothing_held()


def test_end_of_sequence_is_a_stop_without_a_token():
    prompt = prompt_of(6)
    tokens = expected_tokens(prompt, 4)
    rig = make_rig()
    request = make_request(prompt, 10, eos_token_ids=frozenset({tokens[0]}))
    assert rig.run(request) == [tokens[:1]]
    finish = rig.seen.finishes[request.request_id]
    assert (finish.reason, finish.stop_token_id) == (FinishReason.STOP, None)


def test_stops_wait_for_min_tokens():
    prompt = prompt_of(6)
    tokens = expected_tokens(prompt, 10)
    rig = make_rig()
    request = make_request(prompt, 10, min_tokens=3, stop_token_ids=frozenset(tokens[:3]))
    assert rig.run(request) == [tokens[:3]]


@DEPTHS
def test_a_length_stop_wastes_no_token(depth: int):
    rig = make_rig(make_executor(depth=depth))
    request = make_request(prompt_of(6), 7)
    rig.run(request)
    check_all(rig, [request])
    assert rig.engine.counters().num_discarded_tokens == 0


def test_the_model_length_ends_a_request():
    rig = make_rig(make_executor(max_model_len=20))
    request = make_request(prompt_of(15), 100)
    (tokens,) = rig.run(request)
    assert len(tokens) == 5
    assert rig.seen.finishes[request.request_id].reason is FinishReason.LENGTH


def test_a_pool_smaller_than_the_model_length_ends_a_request_too():
    rig = make_rig(make_executor(num_blocks=5))
    assert rig.engine.max_model_len == 20
    (tokens,) = rig.run(make_request(prompt_of(15), 100))
    assert len(tokens) == 5
    rig.assert_nothing_held()


# Refusals.


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"prompt": []}, "prompt_token_ids", "at least 1"),
        ({"prompt": [5, 4096]}, "prompt_token_ids", "is 4096; the vocabulary has 4096"),
        ({"prompt": [5, -1]}, "prompt_token_ids", "is 4294967295; the vocabulary"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", "between 0 and max_tokens"),
        ({"cache_namespace": b"x"}, "cache_namespace", "must have 16"),
    ],
)
def test_a_bad_request_is_refused_by_name(values: dict, field: str, words: str):
    rig = make_rig()
    with pytest.raises(InvalidRequest, match=words) as caught:
        rig.submit(make_request(**{"prompt": [5, 6], **values}))
    assert caught.value.field == field
    assert not rig.engine.has_work()


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers():
    rig = make_rig(make_executor(num_blocks=8))
    with pytest.raises(InvalidRequest) as caught:
        rig.submit(make_request(prompt_of(33)))
    for number in ("33 tokens", "9 blocks", "at most 31", "32 tokens", "8 blocks"):
        assert number in caught.value.message


def test_a_full_queue_refuses_and_says_when_to_come_back():
    rig = make_rig(make_executor(max_num_requests=2), max_num_requests=2, max_queue_depth=3)
    requests = [make_request(prompt_of(5, salt=i)) for i in range(5)]
    rig.submit(*requests)
    with pytest.raises(NoCapacity, match="the queue takes 3") as caught:
        rig.submit(make_request(prompt_of(5)))
    assert caught.value.retry_after_ms is not None
    rig.drain()
    check_all(rig, requests)


def test_a_request_id_in_use_is_refused():
    rig = make_rig()
    rig.submit(make_request([5, 6], request_id="same"))
    with pytest.raises(InvalidRequest, match="exists already"):
        rig.submit(make_request([5, 6], request_id="same"))


def test_settings_that_contradict_each_other_are_named():
    with pytest.raises(InvalidRequest, match="max_num_batched_tokens is 8, max_num_requests is 9"):
        EngineSettings(max_num_batched_tokens=8, max_num_requests=9).validate()


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


def test_a_request_fails_at_its_deadline_and_the_others_go_on():
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
    assert len(rig.engine._deadlines._heap) <= 65


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


# Prefixes that are being computed.


@DEPTHS
def test_a_burst_with_one_prefix_computes_it_once(depth: int):
    rig = make_rig(make_executor(depth=depth))
    prompt = prompt_of(200)
    requests = [make_request([*prompt, 50 + i], 4) for i in range(8)]
    rig.run(*requests)
    check_all(rig, requests)
    assert rig.engine.counters().num_cached_tokens == 7 * 200


@DEPTHS
def test_aborting_the_one_that_computes_a_prefix_wakes_those_who_wait(depth: int):
    rig = make_rig(make_executor(depth=depth))
    prompt = prompt_of(200)
    requests = [make_request([*prompt, 50 + i], 4) for i in range(4)]
    rig.submit(*requests)
    rig.step()
    rig.step()
    rig.engine.abort(requests[0].request_id)
    rig.engine.abort(requests[2].request_id)
    rig.drain()
    check_all(rig, [requests[1], requests[3]])


def test_preempting_the_one_that_computes_a_prefix_wakes_those_who_wait():
    rig = make_rig(make_executor(num_blocks=32), max_num_batched_tokens=32)
    prompt = prompt_of(100)
    low = [make_request([*prompt, 50 + i], 4, priority=5) for i in range(3)]
    rig.submit(*low)
    rig.step()
    high = make_request(prompt_of(90, salt=1), 4, priority=0)
    rig.submit(high)
    rig.drain()
    check_all(rig, [*low, high])
    assert rig.seen.finishes[low[0].request_id].num_preemptions >= 1


# Events.


def test_events_replayed_give_the_cached_hashes():
    rig = make_rig(make_executor(num_blocks=24))
    known: set[bytes] = set()
    for i in range(12):
        rig.run(make_request(prompt_of(30, salt=i), 10))
        for event in rig.engine.take_events():
            hashes = {event.block_hashes[j : j + 16] for j in range(0, len(event.block_hashes), 16)}
            known = known | hashes if isinstance(event, StoredEvent) else known - hashes
            assert isinstance(event, (StoredEvent, RemovedEvent))
    cached = rig.engine.cached_hashes()
    assert known == {cached[j : j + 16] for j in range(0, len(cached), 16)}
    assert rig.engine.counters().num_evicted_blocks > 0


@DEPTHS
def test_a_reset_forgets_the_cache_and_disturbs_nobody(depth: int):
    rig = make_rig(make_executor(depth=depth))
    prompt = prompt_of(40)
    running = [make_request([*prompt, 9], 20), make_request([*prompt, 8], 20)]
    rig.submit(*running)
    for _ in range(4):
        rig.step()
    assert rig.engine.reset_prefix_cache() == 2
    assert rig.engine.epoch == 2
    assert rig.engine.cached_hashes() == b""
    rig.drain()
    assert rig.engine.take_events() == []
    again = make_request([*prompt, 7], 4)
    rig.run(again)
    assert rig.seen.finishes[again.request_id].num_cached_tokens == 0
    check_all(rig, [*running, again])


# The decode side of a hand-over.


def submit_remote(rig: Rig, prompt: list[int], max_tokens: int = 8, **values: object) -> Request:
    request = make_request(prompt, max_tokens, remote_prefill=True, **values)
    rig.submit(request)
    rig.step()
    assert request.request_id in rig.seen.num_wanted
    return request


def receive(rig: Rig, request: Request) -> None:
    """The lease and the push, up to but without finish_transfer."""
    first_block = rig.seen.num_wanted[request.request_id] // BLOCK_SIZE
    leased = rig.engine.reserve_blocks(request.request_id)
    assert leased is not None
    write_remote_kv(rig.executor, request.token_ids, first_block, leased)


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


def test_only_what_is_not_cached_is_transferred():
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


def test_a_failed_remote_prefill_lets_one_who_waits_ask_instead():
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


def test_leases_leave_room_for_everyone_that_runs():
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


def test_a_transferred_prompt_runs_before_those_who_wait_for_its_blocks():
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


# The prefill side of a hand-over.


@DEPTHS
def test_a_prefill_for_another_worker_holds_its_blocks_until_freed(depth: int):
    rig = make_rig(make_executor(depth=depth), max_num_batched_tokens=32)
    prompt = prompt_of(70)
    request = make_request(prompt, 20, prefill_only=True)
    rig.submit(request)
    started = []
    while not rig.seen.first_tokens:
        started += rig.step().prefill_started
    rig.drain()
    assert [(s.request, s.num_cached_tokens, len(s.block_ids)) for s in started] == [(request, 0, 18)]
    assert rig.seen.progress[request.request_id] == [32, 64, 70]
    assert rig.seen.first_tokens[request.request_id] == expected_tokens(prompt, 1)[0]
    assert rig.seen.finishes == {}
    assert started[0].block_ids == rig.engine.block_ids(request.request_id)
    assert rig.engine.audit().num_held_blocks == 18
    rig.engine.free_prefill(request.request_id)
    rig.engine.free_prefill(request.request_id)
    rig.assert_nothing_held()


@DEPTHS
@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_an_abort_of_a_prefill_frees_its_blocks(steps: int, depth: int):
    rig = make_rig(make_executor(depth=depth), max_num_batched_tokens=32)
    request = make_request(prompt_of(70), prefill_only=True)
    rig.submit(request)
    for _ in range(steps):
        rig.step()
    rig.engine.abort(request.request_id)
    rig.drain()
    assert rig.seen.finishes[request.request_id].reason is FinishReason.ABORT
    rig.engine.free_prefill(request.request_id)
    rig.assert_nothing_held()


def test_the_listener_hears_of_a_prefill_before_it_is_launched():
    rig = make_rig()
    told: list[tuple[str, int]] = []
    rig.engine.on_prefill_started = lambda started: told.append((started.request.request_id, started.row))
    launched: list[int] = []
    launch = rig.executor.launch

    def launch_after_telling(plan: StepPlan) -> None:
        launched.append(len(told))
        launch(plan)

    rig.executor.launch = launch_after_telling  # type: ignore[method-assign]
    request = make_request(prompt_of(9), prefill_only=True)
    rig.submit(request)
    rig.step()
    assert told == [(request.request_id, 0)]
    assert launched == [1]


def test_prefills_for_others_are_never_preempted():
    rig = make_rig(make_executor(num_blocks=20))
    prefill = make_request(prompt_of(30), prefill_only=True, priority=9)
    running = [make_request(prompt_of(8, salt=1 + i), 30) for i in range(3)]
    rig.submit(prefill, *running)
    rig.drain()
    assert rig.seen.started == [prefill.request_id]
    held = rig.engine.block_ids(prefill.request_id)
    words = b"".join(bytes(rig.executor.read_blocks(layer, held)) for layer in range(2))
    fresh = make_rig()
    other = make_request(prompt_of(30), prefill_only=True)
    fresh.run(other)
    held = fresh.engine.block_ids(other.request_id)
    # The last block has two unused slots.
    for layer in range(2):
        ours = words[layer * len(words) // 2 :][: 30 * 8]
        assert ours == bytes(fresh.executor.read_blocks(layer, held))[: 30 * 8]
    rig.engine.free_prefill(prefill.request_id)
    check_all(rig, running)


# What it tells.


def test_load_counts_what_runs_and_what_waits():
    rig = make_rig(make_executor(max_num_requests=2), max_num_requests=2, max_num_batched_tokens=8)
    rig.submit(*(make_request(prompt_of(10, salt=i), 4) for i in range(3)))
    rig.step()
    load = rig.engine.load()
    assert (load.num_running, load.queue_depth) == (1, 2)
    assert load.num_pending_prefill_tokens == 22
    assert load.num_context_tokens == 8
    assert load.num_free_blocks == load.num_blocks - 3


def test_rates_are_learnt_from_the_steps():
    clock = Clock()
    speed = SimSpeed(base=0.01, per_prefill_token=0.001, per_decode_request=0.0, per_context_token=0.0)
    rig = make_rig(make_executor(clock, speed=speed), clock)
    assert rig.engine.load().decode_step_seconds == 0
    rig.run(make_request(prompt_of(200), 50))
    load = rig.engine.load()
    assert load.decode_step_seconds == pytest.approx(0.01)
    assert load.prefill_tokens_per_second == pytest.approx(200 / 0.24, rel=0.01)


def test_counters_add_up():
    rig = make_rig()
    rig.run(*(make_request(prompt_of(10, salt=i), 4) for i in range(3)))
    aborted = make_request(prompt_of(5))
    rig.submit(aborted)
    rig.engine.abort(aborted.request_id)
    rig.drain()
    counters = rig.engine.counters()
    assert (counters.num_finished, counters.num_aborted, counters.num_failed) == (3, 1, 0)
    assert (counters.num_prompt_tokens, counters.num_output_tokens) == (30, 12)
    assert counters.num_steps > 0


def test_times_are_told_at_the_finish():
    clock = Clock()
    rig = make_rig(make_executor(clock, speed=SimSpeed(base=1.0), max_num_requests=1), clock, max_num_requests=1)
    first, second = make_request(prompt_of(5), 3), make_request(prompt_of(5, salt=1), 3)
    rig.run(first, second)
    finish = rig.seen.finishes[second.request_id]
    assert finish.queue_seconds == pytest.approx(3.0, rel=0.01)
    assert finish.prefill_seconds == pytest.approx(1.0, rel=0.01)


def test_the_audit_sees_a_leak():
    rig = make_rig()
    rig.run(make_request(prompt_of(10)))
    rig.engine._scheduler.pool.allocate(1)
    with pytest.raises(DataLoss):
        rig.engine.audit()
