"""The hand-over between two engines: answers, every way it can fail, and that no block is ever lost."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

import pytest
from engine_harness import expected_for, make_executor, make_request, prompt_of
from handover_harness import Network, finished, idle, make_node, turn_until

from baton.v1 import types_pb2, worker_pb2
from baton.worker.core import FinishReason, SamplingParams
from baton.worker.executor.sim import SimSpeed
from baton.worker.handover.settings import HandoverSettings
from baton.worker.link import Kind


@pytest.fixture
def network():
    made = Network()
    yield made
    for node in made.nodes.values():
        node.handover.close()


@pytest.fixture
def pair(network):
    return make_node(network, "prefill"), make_node(network, "decode")


def test_the_answer_is_that_of_a_single_engine(pair):
    prefill, decode = pair
    requests = [make_request(prompt_of(20 + 13 * i, i), 12) for i in range(6)]
    for request in requests:
        decode.submit(request, prefill)
    turn_until(pair, finished(decode, *requests))
    for request in requests:
        assert decode.seen.tokens[request.request_id] == expected_for(request)
        assert decode.seen.finishes[request.request_id].num_transferred_tokens == request.num_prompt_tokens
    turn_until(pair, idle(*pair))
    counters = decode.handover.counters()
    assert (counters.num_transfers, counters.num_failed_transfers) == (6, 0)
    assert counters.num_transfer_bytes == prefill.handover.counters().num_sent_bytes > 0
    assert decode.engine.counters().num_local_fallbacks == 0
    for node in pair:
        node.assert_nothing_held()


def test_blocks_that_the_decode_worker_has_are_not_sent(pair):
    prefill, decode = pair
    first = make_request(prompt_of(41), 4)
    decode.submit(first, prefill)
    turn_until(pair, finished(decode, first))
    turn_until(pair, idle(*pair))
    before = decode.handover.counters().num_transfer_bytes
    longer = make_request(prompt_of(41) + prompt_of(30, 5), 6)
    decode.submit(longer, prefill)
    turn_until(pair, finished(decode, longer))
    assert decode.seen.tokens[longer.request_id] == expected_for(longer)
    layout = decode.executor.layout
    sent_blocks = (decode.handover.counters().num_transfer_bytes - before) // layout.bytes_per_block
    assert sent_blocks == -(-71 // layout.block_size) - 40 // layout.block_size
    assert decode.seen.finishes[longer.request_id].num_cached_tokens == 40


def test_what_the_prefill_worker_has_cached_is_sent_and_reported(network, pair):
    prefill, decode = pair
    other = make_node(network, "other")
    first, second = make_request(prompt_of(50), 4), make_request(prompt_of(50), 4)
    decode.submit(first, prefill)
    turn_until((*pair, other), finished(decode, first))
    other.submit(second, prefill)
    turn_until((*pair, other), finished(other, second))
    assert other.seen.tokens[second.request_id] == expected_for(second)
    assert second.num_prefill_cached_tokens == 48


def test_a_prompt_of_many_chunks_is_pushed_while_it_is_computed(network):
    pair = prefill, decode = (
        make_node(network, "prefill", make_executor(speed=SimSpeed())),
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

    turn_until(pair, done)
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
    turn_until(pair, lambda: held and request.request_id in decode.seen.tokens)
    assert len(decode.seen.tokens[request.request_id]) == 1
    network.tap = lambda node, kind, payload: payload
    (stream,) = network.streams
    decode.inbox.append((Kind.PEER, stream.decode_channel, held[0]))
    turn_until(pair, finished(decode, request))
    assert decode.seen.tokens[request.request_id] == expected_for(request)
    assert decode.handover.counters().exposed_seconds > 0


def test_sampling_and_resumed_output_give_the_tokens_that_would_have_come(pair):
    prefill, decode = pair
    sampling = SamplingParams(temperature=0.75, seed=17)
    whole = make_request(prompt_of(40), 16, sampling=sampling)
    expected = expected_for(whole)
    resumed = make_request([*prompt_of(40), *expected[:6]], 16, sampling=sampling, num_prompt_tokens=40)
    decode.submit(whole, prefill)
    decode.submit(resumed, prefill)
    turn_until(pair, finished(decode, whole, resumed))
    assert decode.seen.tokens[whole.request_id] == expected
    assert decode.seen.tokens[resumed.request_id] == expected[6:]


def test_a_request_that_ends_with_its_first_token_leaves_its_kv_in_the_cache(pair):
    prefill, decode = pair
    request = make_request(prompt_of(40), 1)
    decode.submit(request, prefill)
    turn_until(pair, finished(decode, request))
    turn_until(pair, idle(*pair))
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
        prefill.turn()
        outputs = decode.turn()
        found += [logprobs for _, _, logprobs in outputs.tokens()]
    assert [len(logprobs.top_token_ids) for logprobs in found] == [2, 2]


# Failures.


def _falls_back(pair, request, seconds=10.0):
    """The request is answered right, by a local prefill, and nothing stays behind."""
    decode = pair[-1]
    turn_until(pair, finished(decode, request), seconds)
    assert decode.seen.tokens[request.request_id] == expected_for(request)
    finish = decode.seen.finishes[request.request_id]
    assert finish.queue_seconds >= 0
    assert finish.prefill_seconds >= 0
    turn_until(pair, idle(*pair))
    for node in pair:
        if node.alive:
            node.assert_nothing_held()


def test_an_unreachable_prefill_worker_costs_one_try(pair):
    _, decode = pair
    nobody = types_pb2.Endpoint(worker_id="gone", epoch=1, address="nowhere")
    first, second = make_request(prompt_of(30), 4), make_request(prompt_of(30, 1), 4)
    decode.submit(first, nobody)
    _falls_back((decode,), first)
    decode.submit(second, nobody)
    decode.turn()
    assert decode.handover.num_open == 0, "asked again at once"
    _falls_back((decode,), second)
    assert decode.engine.counters().num_local_fallbacks == 2


def test_a_peer_with_another_layout_is_named_and_not_asked_again(network, caplog):
    prefill = make_node(network, "prefill", make_executor(block_size=8))
    decode = make_node(network, "decode")
    first, second = make_request(prompt_of(30), 4), make_request(prompt_of(30, 1), 4)
    decode.submit(first, prefill)
    began = time.monotonic()
    _falls_back((prefill, decode), first)
    assert time.monotonic() - began < 1
    assert decode.handover.counters().num_mismatches == 1
    assert "block_size=4" in caplog.text
    assert "block_size=8" in caplog.text
    decode.submit(second, prefill)
    decode.turn()
    assert decode.handover.num_open == 0
    _falls_back((prefill, decode), second)
    assert prefill.engine.counters().num_prompt_tokens == 0
    assert decode.handover.counters().num_mismatches == 1


def test_a_full_queue_of_the_prefill_worker_is_a_local_prefill(network):
    prefill = make_node(network, "prefill", max_queue_depth=0, max_num_requests=1)
    decode = make_node(network, "decode")
    requests = [make_request(prompt_of(200, i), 4) for i in range(4)]
    for request in requests:
        decode.submit(request, prefill)
    turn_until((prefill, decode), finished(decode, *requests))
    for request in requests:
        assert decode.seen.tokens[request.request_id] == expected_for(request)
    assert decode.handover.counters().num_refused_prefills > 0
    turn_until((prefill, decode), idle(prefill, decode))
    prefill.assert_nothing_held()


def test_a_draining_prefill_worker_refuses(pair):
    prefill, decode = pair
    prefill.handover.begin_drain()
    request = make_request(prompt_of(30), 4)
    decode.submit(request, prefill)
    _falls_back(pair, request)
    assert decode.handover.counters().num_refused_prefills == 1


def test_a_full_pool_here_waits_for_room_and_loses_nothing(network):
    prefill = make_node(network, "prefill")
    decode = make_node(network, "decode", make_executor(num_blocks=40))
    requests = [make_request(prompt_of(100, i), 20) for i in range(6)]
    for request in requests:
        decode.submit(request, prefill)
    turn_until((prefill, decode), finished(decode, *requests))
    for request in requests:
        assert decode.seen.tokens[request.request_id] == expected_for(request)
    turn_until((prefill, decode), idle(prefill, decode))
    for node in (prefill, decode):
        node.assert_nothing_held()


def test_no_room_for_long_is_a_local_prefill(network):
    prefill = make_node(network, "prefill")
    decode = make_node(
        network, "decode", make_executor(num_blocks=40), HandoverSettings(lease_seconds=0.4, reserve_seconds=0.1)
    )
    long = make_request(prompt_of(20), 120)
    decode.engine.submit(long)
    for _ in range(90):
        decode.turn()
    request = make_request(prompt_of(120, 3), 4)
    decode.submit(request, prefill)
    decode.turn()
    deadline = time.monotonic() + 5
    while decode.engine.counters().num_local_fallbacks == 0 and time.monotonic() < deadline:
        prefill.turn()
        decode.turn_without_step()
    assert decode.engine.counters().num_local_fallbacks == 1
    turn_until((prefill, decode), finished(decode, long, request))
    assert decode.seen.tokens[request.request_id] == expected_for(request)


def test_a_prefill_worker_that_cannot_reach_our_listener_is_not_asked_for_ever(network):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    prefill = make_node(network, "prefill")
    decode = make_node(network, "decode", transfer_address=lambda _: f"127.0.0.1:{port}")
    for salt in range(3):
        request = make_request(prompt_of(30, salt), 4)
        decode.submit(request, prefill)
        decode.turn()
        assert decode.handover.num_open == 1
        _falls_back((prefill, decode), request)
    last = make_request(prompt_of(30, 9), 4)
    decode.submit(last, prefill)
    decode.turn()
    assert decode.handover.num_open == 0
    _falls_back((prefill, decode), last)


PHASES = ("hello", "submit", "accept", "complete", "started", "first_token", "sent")


def _at_message(network, name, act, before=True):
    """Adds to `act` when the first message of that name passes; before: the message is lost."""
    seen = threading.Event()

    def tap(node, kind, payload):
        message = (worker_pb2.PrefillStreamRequest if kind == Kind.PEER else worker_pb2.PrefillStreamResponse)()
        message.ParseFromString(payload)
        if message.WhichOneof("message") == name and not seen.is_set():
            seen.set()
            act.append(name)
            return None if before else payload
        return payload

    network.tap = tap


@pytest.mark.parametrize("lost", [True, False], ids=["message-lost", "message-sent"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_worker_killed_in_any_phase_leaves_nothing_with_the_other(pair, network, phase, victim, lost):
    prefill, decode = pair
    acts: list[str] = []
    _at_message(network, phase, acts, lost)
    request = make_request(prompt_of(150), 6)
    decode.submit(request, prefill)
    turn_until(pair, lambda: bool(acts))
    killed_at = time.monotonic()
    if victim == "prefill":
        prefill.kill()
        _falls_back(pair, request) if phase != "complete" else turn_until(pair, finished(decode, request))
        assert decode.seen.tokens[request.request_id] == expected_for(request)
    else:
        decode.kill()
        turn_until(pair, idle(*pair))
        prefill.assert_nothing_held()
    assert time.monotonic() - killed_at < 2


@pytest.mark.parametrize("phase", PHASES)
def test_a_stream_cut_in_any_phase_is_a_local_prefill(pair, network, phase):
    prefill, decode = pair
    acts: list[str] = []
    _at_message(network, phase, acts)
    request = make_request(prompt_of(150), 6)
    decode.submit(request, prefill)
    turn_until(pair, lambda: bool(acts))
    network.cut(prefill)
    _falls_back(pair, request)


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_in_any_phase_gives_every_block_back(pair, network, phase):
    prefill, decode = pair
    acts: list[str] = []
    _at_message(network, phase, acts, before=False)
    request = make_request(prompt_of(150), 6)
    decode.submit(request, prefill)
    turn_until(pair, lambda: bool(acts))
    decode.engine.abort(request.request_id)
    turn_until(pair, finished(decode, request))
    assert decode.seen.finishes[request.request_id].reason is FinishReason.ABORT
    turn_until(pair, idle(*pair), 2)
    for node in pair:
        node.assert_nothing_held()


@pytest.mark.parametrize("phase", ["submit", "accept", "started", "first_token", "sent", "complete"])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_worker_frozen_in_any_phase_costs_the_other_its_lease_at_most(pair, network, phase, victim):
    prefill, decode = pair
    acts: list[str] = []
    _at_message(network, phase, acts, before=False)
    request = make_request(prompt_of(150), 6)
    decode.submit(request, prefill)
    turn_until(pair, lambda: bool(acts))
    frozen = prefill if victim == "prefill" else decode
    frozen.frozen = True
    network.tap = lambda node, kind, payload: None if node is frozen else payload
    if frozen is prefill:
        turn_until(pair, finished(decode, request), 2.5)
        assert decode.seen.tokens[request.request_id] == expected_for(request)
    else:
        turn_until(pair, lambda: prefill.handover.num_open == 0, 2.5)
    network.tap = lambda node, kind, payload: payload
    frozen.frozen = False
    turn_until(pair, finished(decode, request))
    assert decode.seen.tokens[request.request_id] == expected_for(request)
    turn_until(pair, idle(*pair))
    for node in pair:
        node.assert_nothing_held()


class TamperingProxy:
    """Passes bytes on, but for one that it changes."""

    def __init__(self, target_port: int, position: int) -> None:
        self.position = position
        self.tampered = False
        self._target = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(2)
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                source, _ = self._listener.accept()
            except OSError:
                return
            sink = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [source, sink]
            thread = threading.Thread(target=self._pass, args=(source, sink), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        passed = 0
        try:
            while data := source.recv(65536):
                changed = bytearray(data)
                if not self.tampered and passed <= self.position < passed + len(data):
                    changed[self.position - passed] ^= 0x10
                    self.tampered = True
                passed += len(data)
                sink.sendall(changed)
        except OSError:
            pass


@pytest.mark.parametrize(("position", "num_checksum_errors"), [(100, 1), (20, 0), (1000, 1)])
def test_a_byte_corrupted_in_flight_never_changes_a_token(network, position, num_checksum_errors):
    proxies: list[TamperingProxy] = []

    def through_proxy(port: int) -> str:
        proxies.append(TamperingProxy(port, position))
        return f"127.0.0.1:{proxies[0].port}"

    prefill = make_node(network, "prefill")
    decode = make_node(network, "decode", transfer_address=through_proxy)
    try:
        request = make_request(prompt_of(150), 6)
        decode.submit(request, prefill)
        _falls_back((prefill, decode), request)
        assert proxies[0].tampered
        assert decode.handover.counters().num_checksum_errors == num_checksum_errors
        assert decode.handover.counters().num_failed_transfers == 1
        assert decode.engine.counters().num_local_fallbacks == 1
        again = make_request(prompt_of(150, 2), 6)
        decode.submit(again, prefill)
        turn_until((prefill, decode), finished(decode, again))
        assert decode.seen.tokens[again.request_id] == expected_for(again)
    finally:
        prefill.handover.close()
        decode.handover.close()
        for proxy in proxies:
            proxy.close()


def test_a_decode_worker_restarted_at_the_same_address_takes_nothing_of_its_past(network):
    prefill = make_node(network, "prefill")
    decode = make_node(network, "decode")
    port = decode.transport.addresses[0].address.rpartition(":")[2]
    acts: list[str] = []
    _at_message(network, "accept", acts, before=False)
    request = make_request(prompt_of(300), 6)
    decode.submit(request, prefill)
    turn_until((prefill, decode), lambda: bool(acts))
    decode.kill()
    network.tap = lambda node, kind, payload: payload
    again = make_node(network, "decode", port=int(port))
    same = make_request(prompt_of(300), 6)
    again.submit(same, prefill)
    turn_until((prefill, again), finished(again, same))
    assert again.seen.tokens[same.request_id] == expected_for(same)
    turn_until((prefill, again), idle(prefill, again))
    for node in (prefill, again):
        node.assert_nothing_held()


def test_a_prefill_worker_restarted_at_the_same_address_is_asked_again(network, pair):
    prefill, decode = pair
    first, second = make_request(prompt_of(60), 4), make_request(prompt_of(60, 1), 4)
    decode.submit(first, prefill)
    turn_until(pair, finished(decode, first))
    prefill.kill()
    restarted = make_node(network, "prefill")
    decode.submit(second, restarted)
    turn_until((restarted, decode), finished(decode, second))
    assert decode.seen.tokens[second.request_id] == expected_for(second)
    assert decode.handover.counters().num_transfers == 2


def test_malformed_messages_end_their_stream_and_nothing_else(network, pair):
    prefill, decode = pair
    other = make_node(network, "other")
    requests = [make_request(prompt_of(100, i), 5) for i in range(4)]
    for request in requests:
        decode.submit(request, prefill)
    acts: list[str] = []
    _at_message(network, "started", acts, before=False)
    nodes = (*pair, other)
    turn_until(nodes, lambda: bool(acts))
    stray = make_request(prompt_of(50, 9), 4)
    other.submit(stray, prefill)
    for _ in range(3):
        other.turn()
    (theirs,) = [stream for stream in network.streams if stream.decode is other]
    prefill.inbox.append((Kind.PREFILL, theirs.prefill_channel, b"\xff\xff\xff"))
    turn_until(nodes, finished(decode, *requests))
    turn_until(nodes, finished(other, stray))
    for request in requests:
        assert decode.seen.tokens[request.request_id] == expected_for(request)
    assert other.seen.tokens[stray.request_id] == expected_for(stray)
    assert decode.engine.counters().num_local_fallbacks == 0
    assert other.engine.counters().num_local_fallbacks == 1


def test_a_cache_reset_at_either_end_changes_no_answer(pair, network):
    prefill, decode = pair
    for salt, victim in enumerate(pair):
        acts: list[str] = []
        _at_message(network, "accept", acts, before=False)
        request = make_request(prompt_of(150, salt), 6)
        decode.submit(request, prefill)
        turn_until(pair, lambda acts=acts: bool(acts))
        victim.engine.reset_prefix_cache()
        turn_until(pair, finished(decode, request))
        assert decode.seen.tokens[request.request_id] == expected_for(request)
    turn_until(pair, idle(*pair))
    for node in pair:
        node.assert_nothing_held()


def test_a_step_longer_than_the_lease_ends_no_transfer(pair, network):
    prefill, decode = pair
    acts: list[str] = []
    _at_message(network, "accept", acts, before=False)
    request = make_request(prompt_of(150), 6)
    decode.submit(request, prefill)
    turn_until(pair, lambda: bool(acts))
    time.sleep(1.0)  # both engine threads compute; their heartbeats go on
    turn_until(pair, finished(decode, request))
    assert decode.handover.counters().num_transfers == 1
    assert decode.engine.counters().num_local_fallbacks == 0


@pytest.mark.parametrize("phase", ["submit", "started", "accept"])
def test_a_prefill_worker_that_computes_for_longer_than_the_lease_is_believed_to_live(pair, network, phase):
    prefill, decode = pair
    warm = make_request(prompt_of(30, 7), 1)
    decode.submit(warm, prefill)
    turn_until(pair, finished(decode, warm))
    acts: list[str] = []
    _at_message(network, phase, acts, before=False)
    request = make_request(prompt_of(150), 6)
    decode.submit(request, prefill)
    turn_until(pair, lambda: bool(acts))
    until = time.monotonic() + 1.3
    turn_until([decode], lambda: time.monotonic() > until)
    turn_until(pair, finished(decode, request))
    assert decode.engine.counters().num_local_fallbacks == 0
    assert decode.seen.tokens[request.request_id] == expected_for(request)


def test_a_prefill_worker_whose_engine_hangs_is_given_up(network):
    prefill = make_node(network, "prefill", settings=HandoverSettings(lease_seconds=0.4, hang_seconds=0.5))
    decode = make_node(network, "decode")
    acts: list[str] = []
    _at_message(network, "accept", acts, before=False)
    request = make_request(prompt_of(150), 6)
    decode.submit(request, prefill)
    turn_until((prefill, decode), lambda: bool(acts))
    turn_until([decode], finished(decode, request), 2.5)
    assert decode.seen.tokens[request.request_id] == expected_for(request)
    assert decode.handover.counters().num_expired_leases == 1
    turn_until((prefill, decode), idle(prefill, decode))
    prefill.assert_nothing_held()


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
                node.turn()
        if index % 25 == 24:
            network.cut(rng.choice(nodes))
        while live and rng.random() < 0.6:
            owner, victim = live.pop(rng.randrange(len(live)))
            owner.engine.abort(victim.request_id)
    for owner, victim in live:
        owner.engine.abort(victim.request_id)
    for owner, request in kept:
        turn_until(nodes, finished(owner, request))
        assert owner.seen.tokens[request.request_id] == expected_for(request)
    turn_until(nodes, idle(*nodes), 3)
    for node in nodes:
        node.assert_nothing_held()
        assert node.handover.num_stranded_blocks() == 0
