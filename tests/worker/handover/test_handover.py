"""The hand-over between two engines: the answers are those of one engine, whatever is cached where."""

from __future__ import annotations

import time
from functools import partial

from support.engine.engine_harness import expected_for, make_executor, make_request, prompt_of
from support.transfer.handover_harness import finished, idle, make_node, run_until

from baton.v1 import worker_pb2
from baton.worker.core import SamplingParams
from baton.worker.executors.sim.executor import SimSpeed
from baton.worker.link.frames import Kind


def test_the_answer_is_that_of_a_single_engine(pair):
    prefill, decode = pair
    requests = [make_request(prompt_of(20 + 13 * i, i), 12) for i in range(6)]
    for request in requests:
        decode.submit(request, prefill)
    run_until(pair, finished(decode, *requests))
    for request in requests:
        assert decode.seen.tokens[request.request_id] == expected_for(request)
        assert decode.seen.finishes[request.request_id].num_transferred_tokens == request.num_prompt_tokens
    run_until(pair, idle(*pair))
    counters = decode.handover.counters()
    assert (counters.num_transfers, counters.num_failed_transfers) == (6, 0)
    assert counters.num_transfer_bytes == prefill.handover.counters().num_sent_bytes > 0
    assert decode.engine.counters().num_local_fallbacks == 0
    (flow,) = decode.handover.flows()
    assert (flow.sender_worker_id, flow.num_transfers) == ("prefill", 6)
    assert flow.num_bytes == counters.num_transfer_bytes
    assert not prefill.handover.flows()
    for request in requests:
        assert request.transfer is not None
        assert 0 < request.transfer.num_bytes < flow.num_bytes
        assert request.transfer.exposed_seconds <= request.transfer.seconds
    for node in pair:
        node.assert_nothing_held()


def test_blocks_that_the_decode_worker_has_are_not_sent(pair):
    prefill, decode = pair
    first = make_request(prompt_of(41), 4)
    decode.submit(first, prefill)
    run_until(pair, finished(decode, first))
    run_until(pair, idle(*pair))
    before = decode.handover.counters().num_transfer_bytes
    longer = make_request(prompt_of(41) + prompt_of(30, 5), 6)
    decode.submit(longer, prefill)
    run_until(pair, finished(decode, longer))
    assert decode.seen.tokens[longer.request_id] == expected_for(longer)
    spec = decode.executor.kv_spec
    sent_blocks = (decode.handover.counters().num_transfer_bytes - before) // spec.bytes_per_block
    assert sent_blocks == -(-71 // spec.block_size) - 40 // spec.block_size
    assert decode.seen.finishes[longer.request_id].num_cached_tokens == 40


def test_blocks_cached_at_the_prefill_worker_are_sent_and_reported(network, pair):
    prefill, decode = pair
    other = make_node(network, "other")
    first, second = make_request(prompt_of(50), 4), make_request(prompt_of(50), 4)
    decode.submit(first, prefill)
    run_until((*pair, other), finished(decode, first))
    other.submit(second, prefill)
    run_until((*pair, other), finished(other, second))
    assert other.seen.tokens[second.request_id] == expected_for(second)
    assert second.num_prefill_cached_tokens == 48


def test_a_prompt_of_many_chunks_is_pushed_while_it_is_computed(network):
    pair = prefill, decode = (
        make_node(network, "prefill", make_executor(speed=SimSpeed(factor=5))),
        make_node(network, "decode"),
    )
    request = make_request(prompt_of(400), 4)
    decode.submit(request, prefill)
    pushed_before_the_first_token = False

    def done():
        nonlocal pushed_before_the_first_token
        if request.request_id not in decode.seen.tokens:
            pushed_before_the_first_token |= decode.transport.totals().num_received_pieces > 0
        return finished(decode, request)()

    run_until(pair, done)
    assert pushed_before_the_first_token
    assert decode.seen.tokens[request.request_id] == expected_for(request)


def test_the_first_token_goes_out_before_the_kv_is_in(pair, network):
    prefill, decode = pair
    held = []

    def tap(node, kind, payload):
        if kind == Kind.PREFILL and worker_pb2.PrefillStreamResponse.FromString(payload).HasField("sent"):
            held.append(payload)
            return None
        return payload

    network.tap = tap
    request = make_request(prompt_of(60), 5)
    decode.submit(request, prefill)
    run_until(pair, lambda: held and request.request_id in decode.seen.tokens)
    assert len(decode.seen.tokens[request.request_id]) == 1
    network.tap = lambda node, kind, payload: payload
    (stream,) = network.streams
    decode.inbox.append((Kind.PEER, stream.decode_channel, held[0]))
    run_until(pair, finished(decode, request))
    assert decode.seen.tokens[request.request_id] == expected_for(request)
    assert decode.handover.counters().exposed_seconds.sum > 0


def test_kv_that_arrives_before_the_first_token_is_reported_after_it(pair, network):
    prefill, decode = pair
    told: list[str] = []

    def tap(node, kind, payload):
        if kind == Kind.PREFILL:
            told.append(worker_pb2.PrefillStreamResponse.FromString(payload).WhichOneof("message"))
        return payload

    def slow(hook, plan, layer):
        """The last layer's KV arrives while the device still samples."""
        hook(plan, layer)
        until = time.monotonic() + 0.1
        while layer == prefill.executor.kv_spec.num_layers - 1 and time.monotonic() < until:
            prefill.handover.tick()

    watch_layers = prefill.executor.watch_layers
    prefill.executor.watch_layers = lambda hook: watch_layers(partial(slow, hook))
    warm = make_request(prompt_of(20, 1), 2)
    decode.submit(warm, prefill)
    run_until(pair, finished(decode, warm))
    run_until(pair, idle(*pair))
    network.tap = tap
    request = make_request(prompt_of(300), 6)
    decode.submit(request, prefill)
    run_until(pair, finished(decode, request))
    assert decode.seen.tokens[request.request_id] == expected_for(request)
    assert told.index("first_token") < told.index("sent")


def test_sampling_and_resumed_output_give_the_tokens_that_would_have_come(pair):
    prefill, decode = pair
    sampling = SamplingParams(temperature=0.75, seed=17)
    whole = make_request(prompt_of(40), 16, sampling=sampling)
    expected = expected_for(whole)
    resumed = make_request([*prompt_of(40), *expected[:6]], 16, sampling=sampling, num_prompt_tokens=40)
    decode.submit(whole, prefill)
    decode.submit(resumed, prefill)
    run_until(pair, finished(decode, whole, resumed))
    assert decode.seen.tokens[whole.request_id] == expected
    assert decode.seen.tokens[resumed.request_id] == expected[6:]


def test_a_request_that_ends_with_its_first_token_leaves_its_kv_in_the_cache(pair):
    prefill, decode = pair
    request = make_request(prompt_of(40), 1)
    decode.submit(request, prefill)
    run_until(pair, finished(decode, request))
    run_until(pair, idle(*pair))
    assert decode.handover.counters().num_transfers == 1
    assert decode.engine.audit().num_cached_blocks == 10
    for node in pair:
        node.assert_nothing_held()


def test_logprobs_come_with_the_first_token(pair):
    prefill, decode = pair
    request = make_request(prompt_of(40), 2, sampling=SamplingParams(temperature=0.0, logprobs=2))
    decode.submit(request, prefill)
    found = []
    deadline = time.monotonic() + 5
    while not finished(decode, request)() and time.monotonic() < deadline:
        prefill.run_once()
        outputs = decode.run_once()
        found += [logprobs for _, _, logprobs in outputs.tokens()]
    assert [len(logprobs.top_token_ids) for logprobs in found] == [2, 2]
