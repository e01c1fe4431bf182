"""Workers of different layouts hand prompts over as equal ones do: through the whole hand-over and real sockets."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engine.engine_harness import expected_for, make_executor, make_request, prompt_of
from support.engine.tiny_models import make_model, prompts
from support.transfer.handover_harness import Network, Node, finished, idle, make_node, run_until

from baton.v1 import worker_pb2
from baton.worker.config import WorkerConfig
from baton.worker.core import BlockId, Request
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.executors.sim.executor import SimSpeed
from baton.worker.link.frames import Kind

SIZES = [(4, 16), (16, 4), (16, 64), (64, 16), (16, 32), (32, 64), (4, 6), (6, 4)]


@pytest.fixture
def network():
    made = Network()
    yield made
    for node in made.nodes.values():
        node.handover.close()


def pair_of(network: Network, prefill_size: int, decode_size: int, **values: object) -> tuple[Node, Node]:
    prefill = make_node(network, "prefill", make_executor(block_size=prefill_size, **values))
    return prefill, make_node(network, "decode", make_executor(block_size=decode_size, **values))


def hand_over(pair: tuple[Node, Node], *requests: Request) -> None:
    """Runs them to their end, on the decode worker by way of the prefill worker."""
    prefill, decode = pair
    for request in requests:
        decode.submit(request, prefill)
    run_until(pair, finished(decode, *requests))
    run_until(pair, idle(*pair))
    for node in pair:
        node.assert_nothing_held()


@pytest.mark.parametrize(("prefill_size", "decode_size"), SIZES)
def test_block_sizes_may_differ(network, prefill_size, decode_size):
    pair = prefill, decode = pair_of(network, prefill_size, decode_size)
    requests = [make_request(prompt_of(5 + 17 * i, i), 10) for i in range(8)]
    hand_over(pair, *requests)
    for request in requests:
        assert decode.seen.tokens[request.request_id] == expected_for(request)
        assert decode.seen.finishes[request.request_id].num_transferred_tokens == request.num_prompt_tokens
    counters = decode.handover.counters()
    assert (counters.num_transfers, counters.num_failed_transfers, counters.num_mismatches) == (8, 0, 0)
    assert counters.num_transfer_bytes == prefill.handover.counters().num_sent_bytes
    blocks = sum(-(-request.num_prompt_tokens // decode_size) for request in requests)
    assert counters.num_transfer_bytes == blocks * decode.executor.kv_spec.bytes_per_block
    assert decode.engine.counters().num_local_fallbacks == 0


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 4), (4, 16), (6, 4)])
def test_the_decode_workers_prefix_need_not_end_at_the_senders_blocks(network, prefill_size, decode_size):
    pair = _, decode = pair_of(network, prefill_size, decode_size)
    first = make_request(prompt_of(21), 4)
    hand_over(pair, first)
    before = decode.handover.counters().num_transfer_bytes
    longer = make_request(prompt_of(21) + prompt_of(70, 5), 6)
    hand_over(pair, longer)
    cached = 21 // decode_size
    assert decode.seen.finishes[longer.request_id].num_cached_tokens == cached * decode_size
    assert decode.seen.tokens[longer.request_id] == expected_for(longer)
    sent = (decode.handover.counters().num_transfer_bytes - before) // decode.executor.kv_spec.bytes_per_block
    assert sent == -(-91 // decode_size) - cached


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(4, 16), (16, 4)])
def test_cached_blocks_of_the_prefill_worker_are_sent_in_the_receivers_size(network, prefill_size, decode_size):
    pair = prefill, _ = pair_of(network, prefill_size, decode_size)
    other = make_node(network, "other", make_executor(block_size=decode_size))
    first, second = make_request(prompt_of(50), 4), make_request(prompt_of(50), 4)
    hand_over(pair, first)
    hand_over((prefill, other), second)
    assert other.seen.tokens[second.request_id] == expected_for(second)
    assert second.num_prefill_cached_tokens == 48


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(4, 16), (16, 4)])
def test_blocks_go_while_the_prompt_is_computed(network, prefill_size, decode_size):
    pair = _, decode = (
        make_node(network, "prefill", make_executor(block_size=prefill_size, speed=SimSpeed(factor=5))),
        make_node(network, "decode", make_executor(block_size=decode_size)),
    )
    request = make_request(prompt_of(400), 4)
    early = False

    def done() -> bool:
        nonlocal early
        if request.request_id not in decode.seen.tokens:
            early |= decode.transport.totals().num_received_pieces > 0
        return finished(decode, request)()

    decode.submit(request, pair[0])
    run_until(pair, done)
    assert early
    assert decode.seen.tokens[request.request_id] == expected_for(request)


def test_a_layout_that_cannot_be_converted_is_refused_by_both_at_once(network, caplog):
    prefill = make_node(network, "prefill", make_executor(num_layers=5))
    decode = make_node(network, "decode")
    request = make_request(prompt_of(30), 4)
    decode.submit(request, prefill)
    for _ in range(4):  # the hellos cross: nothing is waited for
        decode.run_once()
        prefill.run_once()
    assert decode.handover.num_open == 0
    assert decode.handover.counters().num_mismatches == prefill.handover.counters().num_mismatches == 1
    assert prefill.handover.num_open == 0
    run_until((prefill, decode), finished(decode, request))
    assert decode.seen.tokens[request.request_id] == expected_for(request)
    assert decode.engine.counters().num_local_fallbacks == 1
    assert prefill.engine.counters().num_prompt_tokens == 0
    assert decode.transport.totals().num_received_bytes == 0
    told = re.findall(r"KV cannot be handed over: the prefill worker has (.*), the decode worker has (.*)", caplog.text)
    assert len(told) == 2
    assert told[0] == told[1], "both ends say the same"
    assert ("num_layers=5" in told[0][0], "num_layers=2" in told[0][1]) == (True, True)


def test_a_descriptor_in_the_senders_blocks_is_refused(network):
    """First block and block list are the receiver's; a receiver that counts otherwise gets no bytes."""
    pair = prefill, decode = pair_of(network, 4, 16)

    def tap(node, kind, payload):
        if kind == Kind.PEER:
            message = worker_pb2.PrefillStreamRequest.FromString(payload)
            if message.WhichOneof("message") == "accept":
                del message.accept.transfer.block_ids[:]
                message.accept.transfer.block_ids.extend(range(10))  # 40 tokens in blocks of 4
                return message.SerializeToString()
        return payload

    network.tap = tap
    request = make_request(prompt_of(40), 4)
    hand_over(pair, request)
    assert decode.seen.tokens[request.request_id] == expected_for(request)
    assert decode.engine.counters().num_local_fallbacks == 1
    assert prefill.handover.counters().num_sent_bytes == 0


# Real tensors.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    make_model("qwen3", folder)
    return folder


def cpu_node(network: Network, folder: Path, name: str, block_size: int, dtype: str) -> Node:
    config = WorkerConfig(
        model=str(folder), executor="cpu", dtype=dtype, threads=1, block_size=block_size, num_blocks=64
    )
    return make_node(network, name, CpuExecutor(config))  # type: ignore[arg-type]


def tokens_of(kv: torch.Tensor, block_ids: list[BlockId], num_tokens: int) -> torch.Tensor:
    """[num_layers, 2, heads, num_tokens, head_dim] out of a pool."""
    return torch.cat([kv[:, block] for block in block_ids], dim=3)[:, :, :, :num_tokens]


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 64), (64, 16), (32, 16)])
def test_a_real_model_has_the_same_output_through_blocks_of_another_size(network, folder, prefill_size, decode_size):
    pair = _, decode = (
        cpu_node(network, folder, "prefill", prefill_size, "float32"),
        cpu_node(network, folder, "decode", decode_size, "float32"),
    )
    alone = cpu_node(network, folder, "alone", decode_size, "float32")
    asked = [list(prompt) for prompt in prompts(5, 60)]
    requests = [make_request(prompt, 12) for prompt in asked]
    hand_over(pair, *requests)
    single = [make_request(prompt, 12) for prompt in asked]
    for request in single:
        alone.engine.submit(request)
    run_until((alone,), finished(alone, *single))
    said = [decode.seen.tokens[request.request_id] for request in requests]
    assert said == [alone.seen.tokens[request.request_id] for request in single]
    assert decode.handover.counters().num_transfers > 0
    assert decode.engine.counters().num_local_fallbacks == 0


@pytest.mark.parametrize(
    ("prefill_dtype", "decode_dtype"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16"), ("float32", "float16")],
)
def test_a_real_models_kv_arrives_in_the_receivers_dtype(network, folder, prefill_dtype, decode_dtype):
    pair = prefill, decode = (
        cpu_node(network, folder, "prefill", 16, prefill_dtype),
        cpu_node(network, folder, "decode", 32, decode_dtype),
    )
    request = make_request(list(range(20, 70)), 6)
    tables: dict[str, list[BlockId]] = {}
    decode.submit(request, prefill)

    def done() -> bool:
        for node in pair:
            for name in node.engine._states:
                tables[node.name] = node.engine.block_ids(name)
        return finished(decode, request)()

    run_until(pair, done)
    run_until(pair, idle(*pair))
    assert decode.handover.counters().num_transfers == 1
    assert len(decode.seen.tokens[request.request_id]) == 6
    sent = tokens_of(prefill.executor._memory.groups[0].tensor, tables["prefill"], 50)
    arrived = tokens_of(decode.executor._memory.groups[0].tensor, tables["decode"], 50)
    assert np.array_equal(sent.to(arrived.dtype).float().numpy(), arrived.float().numpy())
