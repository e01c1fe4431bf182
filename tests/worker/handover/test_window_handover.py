"""Hand-overs of models whose windows have block tables of their own: every step reads what it should, nothing leaks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.engine.engine_harness import make_request
from support.engine.rigs.window_executor import VOCAB_SIZE, WindowExecutor, next_token
from support.engine.tiny_models import generate_greedily, make_model, prompts
from support.transfer.handover_harness import Network, Node, finished, idle, make_node, run_until

from baton.v1 import worker_pb2
from baton.worker.config import WorkerConfig
from baton.worker.core import FinishReason, Request
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.handover.settings import HandoverSettings
from baton.worker.link.frames import Kind

SIZES = [(16, 16), (16, 64), (64, 16)]  # of the prefill worker, of the decode worker
WINDOWS = (9, 30)
PATIENT = HandoverSettings(verify=True)


def window_node(network: Network, name: str, block_size: int, windows: tuple[int, ...] = WINDOWS, **values) -> Node:
    device = {key: values.pop(key) for key in ("num_blocks", "depth", "slots") if key in values}
    device = {"num_blocks": 3000 // block_size, "depth": 2, "slots": 0, **device}
    executor = WindowExecutor(
        device["num_blocks"], windows, device["depth"], 400, num_slots=device["slots"], block_size=block_size
    )
    return make_node(
        network, name, executor, **{"settings": PATIENT, "max_num_requests": 8, "min_host_hit_tokens": 0, **values}
    )  # type: ignore[arg-type]


def prompt_of(length: int, salt: int, shared: int = 0) -> list[int]:
    return [(i * 7 + i * i + (salt * 31 if i >= shared else 0)) % VOCAB_SIZE for i in range(length)]


def expected(request: Request) -> list[int]:
    token_ids = list(request.token_ids[: request.num_prompt_tokens])
    for _ in range(request.stop.max_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[request.num_prompt_tokens :]


def hand_over(pair: tuple[Node, Node], *requests: Request, seconds: float = 60) -> None:
    prefill, decode = pair
    for request in requests:
        decode.submit(request, prefill)
    run_until(pair, finished(decode, *requests), seconds)
    run_until(pair, idle(*pair), seconds)
    for node in pair:
        node.assert_nothing_held()


def check(decode: Node, *requests: Request) -> None:
    for request in requests:
        assert decode.seen.tokens[request.request_id] == expected(request)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "cohere2"])
@pytest.mark.parametrize(("prefill_size", "decode_size"), SIZES)
def test_answers_equal_transformers(
    network: Network, name: str, prefill_size: int, decode_size: int, tmp_path: Path
) -> None:
    """In chunks, and again with prefixes at both workers."""
    model = make_model(name, tmp_path)
    pair = []
    for role, size in (("prefill", prefill_size), ("decode", decode_size)):
        config = WorkerConfig(model=str(tmp_path), threads=1, block_size=size, num_blocks=512 // size)
        pair.append(make_node(network, role, CpuExecutor(config), PATIENT, max_num_batched_tokens=48))
    prefill, decode = pair
    assert len(decode.executor.kv_spec.groups) > 1
    for prompt in [*prompts(1, 150), *prompts(1, 40)]:
        request = make_request([*prompt, *range(5, 100)], 4)
        hand_over((prefill, decode), request)
        again = make_request([*request.token_ids, 7, 8, 9], 4)
        hand_over((prefill, decode), again)
        for one in (request, again):
            given = list(one.token_ids[: one.num_prompt_tokens])
            assert decode.seen.tokens[one.request_id] == generate_greedily(model, given, 4)
        assert decode.seen.finishes[request.request_id].num_transferred_tokens == request.num_prompt_tokens
        assert decode.seen.finishes[again.request_id].num_cached_tokens > 0
        counters = decode.handover.counters()
        assert counters.num_mismatches == counters.num_failed_transfers == 0
    assert decode.engine.counters().num_local_fallbacks == 0


def test_a_window_moves_its_last_tokens_only(network: Network) -> None:
    pair = _, decode = window_node(network, "prefill", 16), window_node(network, "decode", 16)
    request = make_request(prompt_of(200, 1), 4)
    hand_over(pair, request)
    check(decode, request)
    spec = decode.executor.kv_spec
    moved = 13 + 2 + 3  # of 16 tokens: 200; the last 8 and the 8 before block 12; the same with 29
    assert decode.handover.counters().num_transfer_bytes == moved * spec.layer_bytes(0)


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_gives_every_token_once(network: Network, seed: int) -> None:
    """Prompts share prefixes, pools are small, requests are aborted; from seed 2 on a stream is cut midway."""
    rng = random.Random(seed)
    sizes = rng.choice([(4, 4), (4, 16), (16, 4), (6, 4)])
    windows = rng.choice([(9,), (5, 30), (30, 9)])
    pair = []
    for name, size in zip(("prefill", "decode"), sizes, strict=True):
        num_blocks, budget = (len(windows) + 1) * 460 // size, rng.choice([24, 64])
        values = {"num_blocks": num_blocks, "depth": rng.randint(1, 3), "slots": rng.choice([0, 20, 200])}
        pair.append(window_node(network, name, size, windows, max_num_batched_tokens=budget, **values))
    prefill, decode = pair
    requests = [
        make_request(prompt_of(rng.randint(5, 320), rng.randint(0, 3), rng.randint(0, 200)), rng.randint(1, 12))
        for _ in range(24)
    ]
    cut_after = rng.randrange(40_000) if seed >= 2 else None  # bytes
    waiting, aborted = list(requests), set()
    for _ in range(200):
        if waiting and rng.random() < 0.3:
            decode.submit(waiting.pop(), prefill)
        if rng.random() < 0.02:
            aborted.add(rng.choice(requests).request_id)
            decode.engine.abort(next(reversed(list(aborted))))
        if cut_after is not None and decode.transport.totals().num_received_bytes > cut_after:
            network.cut(prefill)
            cut_after = None
        for node in pair:
            node.run_once()
            node.engine.audit()
    for request in waiting:
        decode.submit(request, prefill)
    run_until(pair, finished(decode, *requests), 60)
    run_until(pair, idle(*pair), 60)
    for request in requests:
        tokens = decode.seen.tokens.get(request.request_id, [])
        complete = decode.seen.finishes[request.request_id].reason is not FinishReason.ABORT
        assert tokens == expected(request)[: None if complete else len(tokens)]
    assert seed >= 2 or decode.engine.counters().num_transferred_tokens > 0
    for node in pair:
        node.assert_nothing_held()


def test_workers_with_different_windows_refuse_each_other(network: Network) -> None:
    prefill, decode = window_node(network, "prefill", 16, (9,)), window_node(network, "decode", 16, (10,))
    request = make_request(prompt_of(60, 1), 4)
    hand_over((prefill, decode), request)
    check(decode, request)
    assert decode.handover.counters().num_mismatches == prefill.handover.counters().num_mismatches == 1
    assert decode.transport.totals().num_received_bytes == 0


def test_a_receiver_that_asks_for_passed_blocks_is_refused(network: Network) -> None:
    pair = prefill, decode = window_node(network, "prefill", 16), window_node(network, "decode", 16)

    def tap(node: Node, kind: int, payload: bytes) -> bytes:
        message = worker_pb2.PrefillStreamRequest.FromString(payload) if kind == Kind.PEER else None
        if message is None or message.WhichOneof("message") != "accept":
            return payload
        table = message.accept.transfer.more_groups[0]
        table.first_block -= 1
        table.block_ids.insert(0, table.block_ids[0])
        return message.SerializeToString()

    network.tap = tap
    request = make_request(prompt_of(200, 1), 4)
    hand_over(pair, request)
    check(decode, request)
    assert decode.engine.counters().num_local_fallbacks == 1
    assert prefill.handover.counters().num_failed_prefills == 1
    assert decode.transport.totals().num_received_bytes == 0
