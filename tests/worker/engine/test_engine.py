from __future__ import annotations

import dataclasses

import pytest
from support.engine.engine_harness import (
    BLOCK_SIZE,
    DEPTHS,
    Clock,
    check_all,
    expected_tokens,
    make_executor,
    make_request,
    make_rig,
    prompt_of,
)

from baton.rpc.errors import DataLoss, InvalidRequest, NoCapacity, Unsupported
from baton.worker.core import FinishReason, SamplingParams
from baton.worker.executors.sim.executor import SimSpeed
from baton.worker.scheduling.settings import EngineSettings

# Equal output, whatever shares the batch.


@DEPTHS
def test_requests_in_a_mixed_batch_have_the_output_of_each_alone(depth: int):
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
def test_a_resumed_request_continues_its_output(depth: int):
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


def test_a_full_queue_refuses_with_a_retry_delay():
    rig = make_rig(make_executor(max_num_requests=2), max_num_requests=2, max_queue_depth=3)
    requests = [make_request(prompt_of(5, salt=i)) for i in range(5)]
    rig.submit(*requests)
    with pytest.raises(NoCapacity, match="the queue takes 3") as caught:
        rig.submit(make_request(prompt_of(5)))
    assert caught.value.retry_after_ms is not None
    rig.drain()
    check_all(rig, requests)


def test_a_tenant_that_fills_the_queue_has_no_newcomer_refused():
    rig = make_rig(make_executor(max_num_requests=2), max_num_requests=2, max_queue_depth=8)
    requests = [make_request(prompt_of(5, salt=number), tenant="flood") for number in range(10)]
    rig.submit(*requests)
    with pytest.raises(NoCapacity, match="the queue takes 8"):
        rig.submit(make_request(prompt_of(5), tenant="flood"))
    newcomers = [make_request(prompt_of(5, salt=20 + number), tenant="new") for number in range(2)]
    rig.submit(*newcomers)
    with pytest.raises(NoCapacity, match="12 requests wait"):
        rig.submit(make_request(prompt_of(5), tenant="new"))
    rig.drain()
    check_all(rig, [*requests, *newcomers])


def test_a_request_id_in_use_is_refused():
    rig = make_rig()
    rig.submit(make_request([5, 6], request_id="same"))
    with pytest.raises(InvalidRequest, match="exists already"):
        rig.submit(make_request([5, 6], request_id="same"))


def test_settings_that_contradict_each_other_are_named():
    with pytest.raises(InvalidRequest, match="max_num_batched_tokens is 8, max_num_requests is 9"):
        EngineSettings(max_num_batched_tokens=8, max_num_requests=9).validate()


# Events and statistics.


def test_load_counts_running_and_waiting_requests():
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


def test_times_are_reported_at_the_finish():
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


def test_resumed_requests_start_before_new_ones():
    rig = make_rig(max_num_requests=1)
    fresh = [make_request(prompt_of(9, salt=i), 4) for i in range(3)]
    for request in fresh:
        rig.submit(request)
    tokens = [*prompt_of(9, salt=7), 70, 71]
    moved = make_request(tokens, 4, num_prompt_tokens=9)
    rig.submit(moved)
    rig.drain()
    ended = list(rig.seen.finishes)
    assert ended.index(moved.request_id) < ended.index(fresh[-1].request_id)


def test_requests_for_a_missing_head_are_refused():
    rig = make_rig()
    rig.executor.model = dataclasses.replace(rig.executor.model, heads=())
    with pytest.raises(Unsupported, match="no head generate; its heads: none"):
        rig.engine.submit(make_request(prompt_of(9)))
    rig.assert_nothing_held()
