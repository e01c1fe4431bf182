"""States from and to GPUs: in pages of another size, over every way of moving bytes, and through whole hand-overs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.engine.engine_harness import make_request
from support.engine.gpu_engines import check_greedy, executor_for, make_model, make_prompts
from support.transfer.gpu_pairs import other_end
from support.transfer.handover_harness import Network, finished, idle, make_node, run_until
from support.transfer.kv_sender import make_path
from support.transfer.state_sender import NUM_LAYERS, StatePool, StateSource, state_pool

from baton.rpc.errors import DataLoss
from baton.worker.handover.settings import HandoverSettings
from baton.worker.transfer.base import Piece
from baton.worker.transfer.kinds.cuda_slots import DeviceSlots, converted

pytestmark = pytest.mark.gpu

FP32_ROUNDING = 1e-4
SIZES = [(16, 64), (64, 16), (16, 16)]  # of the prefill worker, of the decode worker


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    for node in made.nodes.values():
        node.handover.close()
        node.executor.close()


@pytest.mark.parametrize("name", ["qwen3_next-64", "nemotron_h-64", "lfm2-64"])
@pytest.mark.parametrize("sizes", SIZES)
def test_answers_equal_transformers(network: Network, name: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    """In chunks, at a block's end and within one, and again with prefixes at both workers."""
    model = make_model(name, tmp_path)
    settings = HandoverSettings(verify=True)
    pair = prefill, decode = [
        make_node(network, role, executor_for(tmp_path, block_size=size), settings, max_num_requests=8)
        for role, size in zip(("prefill", "decode"), sizes, strict=True)
    ]
    prompts = make_prompts((5, 63, 64, 150, 333), seed=2)
    answers = []
    for _ in range(2):
        requests = [make_request(prompt, 12) for prompt in prompts]
        for request in requests:
            decode.submit(request, prefill)
        run_until(pair, finished(decode, *requests), 60)
        run_until(pair, idle(*pair), 60)
        answers = [decode.seen.tokens[request.request_id] for request in requests]
        assert check_greedy(model, prompts, answers, FP32_ROUNDING) > 40
        for request in requests:
            finish = decode.seen.finishes[request.request_id]
            assert finish.num_transferred_tokens + finish.num_cached_tokens >= request.num_prompt_tokens
        prompts = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(prompts, answers, strict=True)]
    for node in pair:
        node.assert_nothing_held()
    counters = decode.handover.counters()
    assert counters.num_mismatches == counters.num_failed_transfers == 0
    assert decode.engine.counters().num_local_fallbacks == 0
    assert counters.num_transfers >= 10


def check_moved(source: StatePool, target: StatePool, before: torch.Tensor, first: int, there: int) -> None:
    """Asserts that one state moved, and that no other byte of the target changed."""
    moved, after = source.state(first), target.memory.clone()
    assert torch.equal(target.state(there), moved)
    target.memory.copy_(before)
    for layer in range(NUM_LAYERS):
        target.places.store(layer, torch.tensor([target.pages(there)]), moved[layer : layer + 1].cuda())
    assert torch.equal(after.view(torch.int16), target.memory.view(torch.int16))


@pytest.mark.parametrize(("source_size", "target_size"), [(16, 16), (16, 64), (64, 16)])
def test_a_state_arrives_in_pages_of_another_size(source_size: int, target_size: int) -> None:
    source, target = state_pool(source_size, 1), state_pool(target_size, 2)
    before = target.memory.clone()
    piece = Piece(source.layers.start, 0, 1, source.pages(3), num_layers=NUM_LAYERS)
    values = converted(source.kv, piece, None)
    assert values.numel() == source.piece_bytes == target.piece_bytes
    memory = torch.zeros(2 * 65536, dtype=torch.uint8, device="cuda")
    memory[65536 : 65536 + values.numel()] = values
    torch.cuda.synchronize()
    slots = DeviceSlots(target.kv, memory, 65536)
    assert slots.write(1, target.layers, target.pages(11), None).wait(10)
    check_moved(source, target, before, 3, 11)


def test_a_state_with_nan_is_refused() -> None:
    target = state_pool(16, 2)
    memory = torch.zeros(65536, dtype=torch.uint8, device="cuda")
    memory[: target.piece_bytes].view(torch.float32)[-1] = torch.nan
    torch.cuda.synchronize()
    with pytest.raises(DataLoss, match="a state of KV layers 2 to 4 from another worker holds NaN"):
        DeviceSlots(target.kv, memory, 65536).write(0, target.layers, target.pages(0), None).wait(10)


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_states_of_another_process_arrive_exactly(kind: str) -> None:
    source, target = state_pool(16, 1), state_pool(64, 2)
    path, sender = make_path(kind, target.kv), other_end(StateSource, kind)
    receiver = path.accept(sender.call("offer"))
    sender.call("connect", receiver.slots)
    try:
        for turn in range(7):
            slot, before = turn % receiver.slots.num_slots, target.memory.clone()
            receiver.announced(slot, source.piece_bytes)
            sender.call("put", turn, slot)
            receiver.take(slot, source.piece_bytes)
            assert receiver.write(slot, target.layers, target.pages(2 * turn), None).wait(10)
            check_moved(source, target, before, turn, 2 * turn)
        sender.close()
    finally:
        receiver.close(sender_gone=True)
        sender.kill()
        path.close()
