"""The hand-over between two engines: damage in flight, restarts, malformed messages, and steps longer than leases."""

from __future__ import annotations

import time

import pytest
from support.engine.engine_harness import expected_for, make_request, prompt_of
from support.network.byte_proxy import ByteProxy
from support.transfer.handover_harness import at_message, falls_back, finished, idle, make_node, run_until

from baton.worker.handover.settings import HandoverSettings
from baton.worker.link.frames import Kind


@pytest.fixture
def proxied(network):
    """A prefill worker, a decode worker that is reached through a proxy, and the proxy."""
    proxies: list[ByteProxy] = []

    def through_proxy(port: int) -> str:
        proxies.append(ByteProxy(("127.0.0.1", port)))
        return proxies[0].address

    # Small pieces, so that there is a midway, also where the whole prompt is cached and ready at once.
    settings = HandoverSettings(lease_seconds=0.4, connect_seconds=0.8, verify=True, piece_bytes=512)
    prefill = make_node(network, "prefill", settings=settings)
    yield prefill, make_node(network, "decode", transfer_address=through_proxy), proxies[0]
    proxies[0].close()


def damage_midway(prefill, decode, proxy):
    """Changes a byte of the transfer that is under way, after some of its pieces have landed."""
    before = decode.transport.totals().num_received_bytes
    proxy.bytes_per_second = 40_000
    run_until((prefill, decode), lambda: decode.transport.totals().num_received_bytes > before)
    proxy.flip_next(60)
    proxy.bytes_per_second = 0
    run_until((prefill, decode), lambda: not proxy.flips)


def test_a_byte_corrupted_in_flight_is_a_retry_and_never_changes_a_token(proxied):
    prefill, decode, proxy = proxied
    request = make_request(prompt_of(450), 6)
    decode.submit(request, prefill)
    damage_midway(prefill, decode, proxy)
    falls_back((prefill, decode), request)
    counters, totals = decode.handover.counters(), decode.transport.totals()
    assert counters.num_checksum_errors == totals.num_corrupt_pieces
    assert totals.num_corrupt_pieces + totals.num_bad_connections == 1
    assert (counters.num_failed_transfers, counters.num_retries, counters.num_transfers) == (1, 1, 1)
    assert decode.engine.counters().num_local_fallbacks == 0
    assert decode.seen.finishes[request.request_id].num_transferred_tokens == 450


def test_a_connection_of_which_nothing_can_be_read_is_a_local_prefill(proxied):
    prefill, decode, proxy = proxied
    proxy.flips.append(20)  # at its beginning: nobody can tell whose piece it was
    request = make_request(prompt_of(150), 6)
    decode.submit(request, prefill)
    falls_back((prefill, decode), request)
    assert proxy.num_flipped == 1
    assert decode.handover.counters().num_checksum_errors == 0
    assert decode.engine.counters().num_local_fallbacks == 1


def test_bytes_corrupted_again_and_again_are_a_local_prefill(proxied):
    prefill, decode, proxy = proxied
    request = make_request(prompt_of(450), 6)
    decode.submit(request, prefill)
    damage_midway(prefill, decode, proxy)
    damage_midway(prefill, decode, proxy)
    falls_back((prefill, decode), request)
    counters = decode.handover.counters()
    assert (counters.num_failed_transfers, counters.num_retries, counters.num_transfers) == (2, 1, 0)
    assert decode.engine.counters().num_local_fallbacks == 1
    again = make_request(prompt_of(150, 2), 6)
    decode.submit(again, prefill)
    falls_back((prefill, decode), again)
    assert decode.handover.counters().num_transfers == 1


@pytest.fixture
def strict(network):
    """The same, where prompts whose KV does not arrive are not computed by the decode worker."""
    settings = HandoverSettings(lease_seconds=0.4, connect_seconds=0.8, recompute=False)
    return make_node(network, "prefill", settings=settings), make_node(network, "decode", settings=settings)


@pytest.mark.parametrize("stage", ["before", "midway", "after the first token"])
def test_a_prompt_whose_kv_does_not_arrive_fails_where_nothing_is_recomputed(strict, stage):
    prefill, decode = strict
    request = make_request(prompt_of(450), 6)
    decode.submit(request, prefill)
    if stage == "midway":
        run_until((prefill, decode), lambda: decode.transport.totals().num_received_bytes > 0)
    if stage == "after the first token":
        run_until((prefill, decode), lambda: request.request_id in decode.seen.tokens)
    prefill.kill()
    run_until((prefill, decode), finished(decode, request))
    if request.request_id not in decode.seen.finishes:  # it may have landed before
        error = decode.seen.failures[request.request_id]
        assert "did not arrive from prefill" in error.message
        assert error.retryable
    run_until((prefill, decode), idle(decode))
    decode.assert_nothing_held()
    assert decode.engine.counters().num_local_fallbacks == 0
    if stage == "before":
        assert request.request_id in decode.seen.failures


def test_a_retry_after_the_first_token_gives_no_token_twice(proxied):
    prefill, decode, proxy = proxied
    proxy.bytes_per_second = 8_000
    request = make_request(prompt_of(450), 6)
    decode.submit(request, prefill)
    run_until((prefill, decode), lambda: request.request_id in decode.seen.tokens)
    damage_midway(prefill, decode, proxy)
    falls_back((prefill, decode), request)
    assert decode.handover.counters().num_retries == 1
    assert decode.engine.counters().num_local_fallbacks == 0


def test_a_request_with_little_time_left_is_not_tried_again(proxied):
    prefill, decode, proxy = proxied
    request = make_request(prompt_of(450), 6, deadline=time.monotonic() + 0.9)
    decode.submit(request, prefill)
    damage_midway(prefill, decode, proxy)
    run_until((prefill, decode), finished(decode, request))
    assert decode.handover.counters().num_retries == 0
    assert decode.engine.counters().num_local_fallbacks == 1


@pytest.mark.parametrize("ended", ["aborted", "finished"])
def test_a_request_that_ended_is_not_tried_again(proxied, ended):
    prefill, decode, proxy = proxied
    proxy.bytes_per_second = 8_000
    request = make_request(prompt_of(450), 1 if ended == "finished" else 6)
    decode.submit(request, prefill)
    run_until((prefill, decode), lambda: request.request_id in decode.seen.tokens)
    if ended == "aborted":
        decode.engine.abort(request.request_id)
    if ended == "finished":
        damage_midway(prefill, decode, proxy)
    run_until((prefill, decode), idle(prefill, decode))
    assert decode.handover.counters().num_retries == 0
    for node in (prefill, decode):
        node.assert_nothing_held()


def test_a_decode_worker_restarted_at_the_same_address_takes_nothing_of_its_past(network):
    prefill = make_node(network, "prefill")
    decode = make_node(network, "decode")
    port = decode.transport.addresses[0].address.rpartition(":")[2]
    acts: list[str] = []
    at_message(network, "accept", acts, before=False)
    request = make_request(prompt_of(300), 6)
    decode.submit(request, prefill)
    run_until((prefill, decode), lambda: bool(acts))
    decode.kill()
    network.tap = lambda node, kind, payload: payload
    again = make_node(network, "decode", port=int(port))
    same = make_request(prompt_of(300), 6)
    again.submit(same, prefill)
    run_until((prefill, again), finished(again, same))
    assert again.seen.tokens[same.request_id] == expected_for(same)
    run_until((prefill, again), idle(prefill, again))
    for node in (prefill, again):
        node.assert_nothing_held()


def test_a_prefill_worker_restarted_at_the_same_address_is_asked_again(network, pair):
    prefill, decode = pair
    first, second = make_request(prompt_of(60), 4), make_request(prompt_of(60, 1), 4)
    decode.submit(first, prefill)
    run_until(pair, finished(decode, first))
    prefill.kill()
    restarted = make_node(network, "prefill")
    decode.submit(second, restarted)
    run_until((restarted, decode), finished(decode, second))
    assert decode.seen.tokens[second.request_id] == expected_for(second)
    assert decode.handover.counters().num_transfers == 2


def test_malformed_messages_end_their_stream_and_nothing_else(network, pair):
    prefill, decode = pair
    other = make_node(network, "other")
    requests = [make_request(prompt_of(100, i), 5) for i in range(4)]
    for request in requests:
        decode.submit(request, prefill)
    acts: list[str] = []
    at_message(network, "started", acts, before=False)
    nodes = (*pair, other)
    run_until(nodes, lambda: bool(acts))
    stray = make_request(prompt_of(50, 9), 4)
    other.submit(stray, prefill)
    for _ in range(3):
        other.run_once()
    (theirs,) = [stream for stream in network.streams if stream.decode is other]
    prefill.inbox.append((Kind.PREFILL, theirs.prefill_channel, b"\xff\xff\xff"))
    run_until(nodes, finished(decode, *requests))
    run_until(nodes, finished(other, stray))
    for request in requests:
        assert decode.seen.tokens[request.request_id] == expected_for(request)
    assert other.seen.tokens[stray.request_id] == expected_for(stray)
    assert decode.engine.counters().num_local_fallbacks == 0
    assert other.engine.counters().num_local_fallbacks == 1


def test_a_cache_reset_at_either_end_changes_no_answer(pair, network):
    prefill, decode = pair
    for salt, victim in enumerate(pair):
        acts: list[str] = []
        at_message(network, "accept", acts, before=False)
        request = make_request(prompt_of(150, salt), 6)
        decode.submit(request, prefill)
        run_until(pair, lambda acts=acts: bool(acts))
        victim.engine.reset_prefix_cache()
        run_until(pair, finished(decode, request))
        assert decode.seen.tokens[request.request_id] == expected_for(request)
    run_until(pair, idle(*pair))
    for node in pair:
        node.assert_nothing_held()


def test_a_step_longer_than_the_lease_ends_no_transfer(pair, network):
    prefill, decode = pair
    acts: list[str] = []
    at_message(network, "accept", acts, before=False)
    request = make_request(prompt_of(150), 6)
    decode.submit(request, prefill)
    run_until(pair, lambda: bool(acts))
    time.sleep(1.0)  # both engine threads compute; their heartbeats go on
    run_until(pair, finished(decode, request))
    assert decode.handover.counters().num_transfers == 1
    assert decode.engine.counters().num_local_fallbacks == 0


@pytest.mark.parametrize("phase", ["submit", "started", "accept"])
def test_a_prefill_worker_that_computes_for_longer_than_the_lease_is_believed_to_live(pair, network, phase):
    prefill, decode = pair
    warm = make_request(prompt_of(30, 7), 1)
    decode.submit(warm, prefill)
    run_until(pair, finished(decode, warm))
    acts: list[str] = []
    at_message(network, phase, acts, before=False)
    request = make_request(prompt_of(150), 6)
    decode.submit(request, prefill)
    run_until(pair, lambda: bool(acts))
    until = time.monotonic() + 1.3
    run_until([decode], lambda: time.monotonic() > until)
    run_until(pair, finished(decode, request))
    assert decode.engine.counters().num_local_fallbacks == 0
    assert decode.seen.tokens[request.request_id] == expected_for(request)


def test_a_prefill_worker_whose_engine_hangs_is_given_up(network):
    prefill = make_node(network, "prefill", settings=HandoverSettings(lease_seconds=0.4, hang_seconds=0.5))
    decode = make_node(network, "decode")
    acts: list[str] = []
    at_message(network, "accept", acts, before=False)
    request = make_request(prompt_of(150), 6)
    decode.submit(request, prefill)
    run_until((prefill, decode), lambda: bool(acts))
    run_until([decode], finished(decode, request), 2.5)
    assert decode.seen.tokens[request.request_id] == expected_for(request)
    assert decode.handover.counters().num_expired_leases == 1
    run_until((prefill, decode), idle(prefill, decode))
    prefill.assert_nothing_held()
