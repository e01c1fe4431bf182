"""Hand-overs of models with states: the state at a prompt's end moves once, between pages of any size."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest
import torch
from support.engine.engine_harness import make_request
from support.engine.rigs.window_executor import VOCAB_SIZE as WORDS
from support.engine.rigs.window_executor import WindowExecutor, next_token
from support.engine.tiny_models import generate_greedily, make_model
from support.engine.tiny_shape import VOCAB_SIZE
from support.engine.tiny_state_models import STATE_MODELS
from support.transfer.handover_harness import Network, Node, finished, idle, make_node, run_until

from baton.worker.config import WorkerConfig
from baton.worker.core import FinishReason, Request
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.handover.settings import HandoverSettings
from baton.worker.kv_spec import KvKind
from baton.worker.requests.outputs import Finish

# Of prompts: the tokens that the next turn finds at the decode worker. Decodes leave a state at a block's end, and a
# prompt that ends there brings one.
LENGTHS = {5: 0, 63: 64, 64: 64, 150: 0}
SIZES = [(16, 16), (16, 64), (64, 16)]  # of the prefill worker, of the decode worker
PATIENT = HandoverSettings(verify=True)


def pair_of(network: Network, folder: Path, sizes: tuple[int, int]) -> tuple[Node, Node]:
    nodes = []
    for role, size in zip(("prefill", "decode"), sizes, strict=True):
        config = WorkerConfig(model=str(folder), threads=1, block_size=size, num_blocks=1024 // size)
        nodes.append(make_node(network, role, CpuExecutor(config), PATIENT, max_num_batched_tokens=48))
    return nodes[0], nodes[1]


def state_bytes(node: Node) -> int:
    """Returns the bytes of one state in all layers."""
    spec = node.executor.kv_spec
    (layers,) = [span for span, group in zip(spec.spans, spec.groups, strict=True) if group.kind is KvKind.STATE]
    return sum(map(spec.layer_bytes, layers))


@pytest.mark.parametrize("name", STATE_MODELS)
@pytest.mark.parametrize("sizes", SIZES)
def test_answers_equal_transformers(network: Network, name: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    """In chunks, at a block's end and within one, and again with prefixes at both workers."""
    model = make_model(name, tmp_path)
    pair = _, decode = pair_of(network, tmp_path, sizes)

    def answer(prompt: list[int], count: int) -> Finish:
        request = make_request(prompt, count)
        decode.submit(request, pair[0])
        run_until(pair, finished(decode, request), 60)
        run_until(pair, idle(*pair), 60)
        assert decode.seen.tokens[request.request_id] == generate_greedily(model, prompt, count)
        return decode.seen.finishes[request.request_id]

    for length, found in LENGTHS.items():
        prompt = torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        assert answer(prompt, 6).num_transferred_tokens == length
        turn = [*prompt, *generate_greedily(model, prompt, 6), 7, 8, 9]
        assert answer(turn, 4).num_cached_tokens >= found
    for node in pair:
        node.assert_nothing_held()
    counters = decode.handover.counters()
    assert counters.num_mismatches == counters.num_failed_transfers == 0
    assert decode.engine.counters().num_local_fallbacks == 0


@pytest.mark.parametrize("sizes", SIZES)
def test_what_blocks_held_before_is_in_no_token(network: Network, sizes: tuple[int, int], tmp_path: Path) -> None:
    """A larger block of the receiver has tokens behind those that were sent."""
    model = make_model("qwen3_next", tmp_path)
    pair = _, decode = pair_of(network, tmp_path, sizes)
    for node in pair:
        node.executor._memory.values[:, :-1].view(torch.uint8).fill_(0xFF)
    requests = [make_request(list(range(20, 20 + length)), 12) for length in (5, 21, 70)]
    for request in requests:
        decode.submit(request, pair[0])
    run_until(pair, finished(decode, *requests), 60)
    run_until(pair, idle(*pair), 60)
    for request in requests:
        prompt = list(request.token_ids[: request.num_prompt_tokens])
        assert decode.seen.tokens[request.request_id] == generate_greedily(model, prompt, 12)
        assert decode.seen.finishes[request.request_id].num_transferred_tokens == len(prompt)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_one_state_moves_once(network: Network, name: str, tmp_path: Path) -> None:
    """Of a prompt of several chunks, with the convolution's last inputs."""
    make_model(name, tmp_path)
    pair = _, decode = pair_of(network, tmp_path, (16, 16))
    request = make_request(list(range(5, 105)), 4)
    decode.submit(request, pair[0])
    run_until(pair, finished(decode, request), 60)
    run_until(pair, idle(*pair), 60)
    spec = decode.executor.kv_spec
    conv = {"qwen3_next": 3 * (2 * 2 * 12 + 8 * 16), "lfm2": 2 * 64}[name]  # values of a layer
    rest = {"qwen3_next": 8 * 12 * 16, "lfm2": 0}[name]
    assert state_bytes(decode) == 2 * (conv + rest) * 4
    assert decode.handover.counters().num_transfer_bytes == 7 * spec.layer_bytes(0) + state_bytes(decode)


def stateful_node(
    network: Network, name: str, rng: random.Random, windows: tuple[int, ...], pages: tuple[int, ...]
) -> Node:
    executor = WindowExecutor(rng.choice([240, 400]), windows, rng.randint(1, 3), 400, state_pages=pages)
    values = {"max_num_batched_tokens": rng.choice([24, 64]), "state_snapshot_blocks": rng.randint(0, 3)}
    return make_node(network, name, executor, PATIENT, max_num_requests=6, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_gives_every_token_once(network: Network, seed: int) -> None:
    """Prompts share prefixes, pools are small, requests are aborted; from seed 3 on a stream is cut midway."""
    rng = random.Random(seed)
    windows, pages = rng.choice([(), (9,)]), rng.choice([(1,), (3,), (2, 5)])
    pair = prefill, decode = [stateful_node(network, name, rng, windows, pages) for name in ("prefill", "decode")]
    requests = [
        make_request(prompt_of(rng.randint(5, 320), rng.randint(0, 3), rng.randint(0, 200)), rng.randint(1, 12))
        for _ in range(24)
    ]
    cut_after = rng.randrange(4_000) if seed >= 3 else None  # bytes
    waiting, aborted = list(requests), set()
    ends = time.monotonic() + 30
    for turn in itertools.count():
        # Streams take their time, however fast the machine is.
        if turn >= 200 and (cut_after is None or time.monotonic() > ends):
            break
        if waiting and rng.random() < 0.3:
            decode.submit(waiting.pop(), prefill)
        if turn < 200 and rng.random() < 0.02:
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
    assert cut_after is None
    assert seed >= 3 or decode.engine.counters().num_transferred_tokens > 0
    for node in pair:
        node.assert_nothing_held()


def test_workers_with_different_states_refuse_each_other(network: Network) -> None:
    """By the number of values, before a byte moves."""
    rng = random.Random(0)
    pair = prefill, decode = [
        stateful_node(network, name, rng, (), (n,)) for name, n in (("prefill", 2), ("decode", 3))
    ]
    request = make_request(prompt_of(60, 1, 0), 4)
    decode.submit(request, prefill)
    run_until(pair, finished(decode, request), 60)
    run_until(pair, idle(*pair), 60)
    assert decode.seen.tokens[request.request_id] == expected(request)
    assert decode.handover.counters().num_mismatches == prefill.handover.counters().num_mismatches == 1
    assert decode.transport.totals().num_received_bytes == 0


def prompt_of(length: int, salt: int, shared: int) -> list[int]:
    return [(i * 7 + i * i + (salt * 31 if i >= shared else 0)) % WORDS for i in range(length)]


def expected(request: Request) -> list[int]:
    token_ids = list(request.token_ids[: request.num_prompt_tokens])
    for _ in range(request.stop.max_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[request.num_prompt_tokens :]
