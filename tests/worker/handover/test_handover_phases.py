"""The hand-over between two engines: every fault in every phase, and that no block is ever lost."""

from __future__ import annotations

import random
import time

import pytest
from support.engine.engine_harness import expected_for, make_executor, make_request, prompt_of
from support.transfer.handover_harness import at_message, falls_back, finished, idle, make_node, run_until

from baton.worker.core import FinishReason

PHASES = ("hello", "submit", "accept", "complete", "started", "first_token", "sent")


@pytest.mark.parametrize("lost", [True, False], ids=["message-lost", "message-sent"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_worker_killed_in_any_phase_leaves_nothing_with_the_other(pair, network, phase, victim, lost):
    prefill, decode = pair
    acts: list[str] = []
    at_message(network, phase, acts, lost)
    request = make_request(prompt_of(150), 6)
    decode.submit(request, prefill)
    run_until(pair, lambda: bool(acts))
    killed_at = time.monotonic()
    if victim == "prefill":
        prefill.kill()
        falls_back(pair, request) if phase != "complete" else run_until(pair, finished(decode, request))
        assert decode.seen.tokens[request.request_id] == expected_for(request)
    else:
        decode.kill()
        run_until(pair, idle(*pair))
        prefill.assert_nothing_held()
    assert time.monotonic() - killed_at < 5


@pytest.mark.parametrize("phase", PHASES)
def test_a_stream_cut_in_any_phase_is_a_local_prefill(pair, network, phase):
    prefill, decode = pair
    acts: list[str] = []
    at_message(network, phase, acts)
    request = make_request(prompt_of(150), 6)
    decode.submit(request, prefill)
    run_until(pair, lambda: bool(acts))
    network.cut(prefill)
    falls_back(pair, request)


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_in_any_phase_gives_every_block_back(pair, network, phase):
    prefill, decode = pair
    acts: list[str] = []
    at_message(network, phase, acts, before=False)
    request = make_request(prompt_of(150), 6)
    decode.submit(request, prefill)
    run_until(pair, lambda: bool(acts))
    decode.engine.abort(request.request_id)
    run_until(pair, finished(decode, request))
    assert decode.seen.finishes[request.request_id].reason is FinishReason.ABORT
    run_until(pair, idle(*pair), 2)
    for node in pair:
        node.assert_nothing_held()


@pytest.mark.parametrize("phase", ["submit", "accept", "started", "first_token", "sent", "complete"])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_worker_frozen_in_any_phase_costs_the_other_its_lease_at_most(pair, network, phase, victim):
    prefill, decode = pair
    acts: list[str] = []
    at_message(network, phase, acts, before=False)
    request = make_request(prompt_of(150), 6)
    decode.submit(request, prefill)
    run_until(pair, lambda: bool(acts))
    frozen = prefill if victim == "prefill" else decode
    frozen.frozen = True
    network.tap = lambda node, kind, payload: None if node is frozen else payload
    if frozen is prefill:
        run_until(pair, finished(decode, request), 2.5)
        assert decode.seen.tokens[request.request_id] == expected_for(request)
    else:
        run_until(pair, lambda: prefill.handover.num_open == 0, 2.5)
    network.tap = lambda node, kind, payload: payload
    frozen.frozen = False
    run_until(pair, finished(decode, request))
    assert decode.seen.tokens[request.request_id] == expected_for(request)
    run_until(pair, idle(*pair))
    for node in pair:
        node.assert_nothing_held()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(4))
def test_hundreds_of_aborts_at_random_moments_leave_no_block_behind(network, seed):
    rng = random.Random(seed)
    nodes = [make_node(network, name, make_executor(num_blocks=96)) for name in ("p0", "p1", "d0", "d1")]
    prefills, decodes = nodes[:2], nodes[2:]
    live: list = []
    kept: list = []
    for index in range(100):
        decode = rng.choice(decodes)
        request = make_request(prompt_of(rng.randrange(10, 150), rng.randrange(60)), rng.randrange(1, 12))
        decode.submit(request, rng.choice(prefills))
        (live if rng.random() < 0.8 else kept).append((decode, request))
        for _ in range(rng.randrange(4)):
            for node in rng.sample(nodes, len(nodes)):
                node.run_once()
        if index % 25 == 24:
            network.cut(rng.choice(nodes))
        while live and rng.random() < 0.6:
            owner, victim = live.pop(rng.randrange(len(live)))
            owner.engine.abort(victim.request_id)
    for owner, victim in live:
        owner.engine.abort(victim.request_id)
    for owner, request in kept:
        run_until(nodes, finished(owner, request))
        assert owner.seen.tokens[request.request_id] == expected_for(request)
    run_until(nodes, idle(*nodes), 3)
    for node in nodes:
        node.assert_nothing_held()
        assert node.handover.num_stranded_blocks() == 0
