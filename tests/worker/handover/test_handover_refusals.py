"""The hand-over between two engines: peers that cannot or will not compute a prompt, and rooms that are full."""

from __future__ import annotations

import socket
import time

from support.engine.engine_harness import expected_for, make_executor, make_request, prompt_of
from support.transfer.handover_harness import falls_back, finished, idle, make_node, run_until

from baton.v1 import types_pb2
from baton.worker.handover.settings import HandoverSettings


def test_an_unreachable_prefill_worker_costs_one_try(pair):
    _, decode = pair
    nobody = types_pb2.Endpoint(worker_id="gone", epoch=1, address="nowhere")
    first, second = make_request(prompt_of(30), 4), make_request(prompt_of(30, 1), 4)
    decode.submit(first, nobody)
    falls_back((decode,), first)
    decode.submit(second, nobody)
    decode.run_once()
    assert decode.handover.num_open == 0, "asked again at once"
    falls_back((decode,), second)
    assert decode.engine.counters().num_local_fallbacks == 2


def test_a_peer_with_another_layout_is_named_and_not_asked_again(network, caplog):
    prefill = make_node(network, "prefill", make_executor(num_layers=5))
    decode = make_node(network, "decode")
    first, second = make_request(prompt_of(30), 4), make_request(prompt_of(30, 1), 4)
    decode.submit(first, prefill)
    began = time.monotonic()
    falls_back((prefill, decode), first)
    assert time.monotonic() - began < 5
    assert decode.handover.counters().num_mismatches == 1
    assert "num_layers=2" in caplog.text
    assert "num_layers=5" in caplog.text
    decode.submit(second, prefill)
    decode.run_once()
    assert decode.handover.num_open == 0
    falls_back((prefill, decode), second)
    assert prefill.engine.counters().num_prompt_tokens == 0
    assert decode.handover.counters().num_mismatches == 1


def test_a_full_queue_of_the_prefill_worker_is_a_local_prefill(network):
    prefill = make_node(network, "prefill", max_queue_depth=0, max_num_requests=1)
    decode = make_node(network, "decode")
    requests = [make_request(prompt_of(200, i), 4) for i in range(4)]
    for request in requests:
        decode.submit(request, prefill)
    run_until((prefill, decode), finished(decode, *requests))
    for request in requests:
        assert decode.seen.tokens[request.request_id] == expected_for(request)
    assert decode.handover.counters().num_refused_prefills > 0
    run_until((prefill, decode), idle(prefill, decode))
    prefill.assert_nothing_held()


def test_a_draining_prefill_worker_refuses(pair):
    prefill, decode = pair
    prefill.handover.begin_drain()
    request = make_request(prompt_of(30), 4)
    decode.submit(request, prefill)
    falls_back(pair, request)
    assert decode.handover.counters().num_refused_prefills == 1


def test_a_full_pool_here_waits_for_blocks_and_loses_nothing(network):
    prefill = make_node(network, "prefill")
    decode = make_node(network, "decode", make_executor(num_blocks=40))
    requests = [make_request(prompt_of(100, i), 20) for i in range(6)]
    for request in requests:
        decode.submit(request, prefill)
    run_until((prefill, decode), finished(decode, *requests))
    for request in requests:
        assert decode.seen.tokens[request.request_id] == expected_for(request)
    run_until((prefill, decode), idle(prefill, decode))
    for node in (prefill, decode):
        node.assert_nothing_held()


def test_a_long_wait_for_blocks_becomes_a_local_prefill(network):
    prefill = make_node(network, "prefill")
    decode = make_node(
        network, "decode", make_executor(num_blocks=40), HandoverSettings(lease_seconds=0.4, reserve_seconds=0.1)
    )
    long = make_request(prompt_of(20), 120)
    decode.engine.submit(long)
    for _ in range(90):
        decode.run_once()
    request = make_request(prompt_of(120, 3), 4)
    decode.submit(request, prefill)
    decode.run_once()
    deadline = time.monotonic() + 5
    while decode.engine.counters().num_local_fallbacks == 0 and time.monotonic() < deadline:
        prefill.run_once()
        decode.run_without_step()
    assert decode.engine.counters().num_local_fallbacks == 1
    run_until((prefill, decode), finished(decode, long, request))
    assert decode.seen.tokens[request.request_id] == expected_for(request)


def test_a_prefill_worker_that_cannot_reach_our_listener_is_not_asked_for_ever(network):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    prefill = make_node(network, "prefill")
    decode = make_node(network, "decode", transfer_address=lambda _: f"127.0.0.1:{port}")
    for salt in range(3):
        request = make_request(prompt_of(30, salt), 4)
        decode.submit(request, prefill)
        decode.run_once()
        assert decode.handover.num_open == 1
        falls_back((prefill, decode), request)
    last = make_request(prompt_of(30, 9), 4)
    decode.submit(last, prefill)
    decode.run_once()
    assert decode.handover.num_open == 0
    falls_back((prefill, decode), last)
