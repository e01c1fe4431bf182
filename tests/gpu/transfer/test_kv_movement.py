"""KV from and to a GPU: reported layer by layer, gathered, sent by CUDA IPC and NCCL, scattered."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.engine.gpu_engines import engine_over, executor_for, make_model, make_prompts
from support.processes.child import Child
from support.transfer.gpu_pairs import other_end
from support.transfer.kv_sender import HOST, SHAPE, SLOT_BYTES, BulkSource, make_path, random_pool

from baton.rpc.errors import DataLoss, Mismatch, ServiceError
from baton.worker.core import BlockId, Request, SamplingParams, StepPlan, StopConditions
from baton.worker.executors.base import Executor
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.transfer.bulk import BulkReceiver, Slots

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    folder = tmp_path_factory.mktemp("llama")
    make_model("llama-128", folder)
    executor = executor_for(folder, dtype="bfloat16")
    yield executor
    executor.close()


def request_of(prompt: list[int], name: str) -> Request:
    return Request(name, list(prompt), len(prompt), SamplingParams(temperature=0.0), StopConditions(4), bytes(16))


def test_the_layer_hook_is_called_when_a_layers_kv_is_written(executor: Executor) -> None:
    engine = engine_over(executor)
    prompt = make_prompts([300], seed=5)[0]
    seen: list[tuple[int, list[BlockId], bytes]] = []

    def hook(plan: StepPlan, layer: int) -> None:
        block_ids = [block_id for _, block_ids in plan.new_blocks for block_id in block_ids]
        seen.append((layer, block_ids, bytes(executor.read_blocks(layer, block_ids))))

    executor.watch_layers(hook)
    try:
        engine.submit(request_of(prompt, "a"))
        while engine.has_work():
            engine.step()
        until = time.monotonic() + 10
        while len(seen) < executor.kv_spec.num_layers and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        executor.watch_layers(None)
    assert [layer for layer, _, _ in seen] == list(range(executor.kv_spec.num_layers))
    whole = len(prompt) // executor.kv_spec.block_size  # what follows changes the last block
    size = executor.kv_spec.layer_bytes(0)
    for layer, block_ids, data in seen:
        assert any(data[: whole * size])
        assert bytes(executor.read_blocks(layer, block_ids[:whole])) == data[: whole * size]


def test_callers_need_not_wait_for_a_step(executor: Executor) -> None:
    engine = engine_over(executor)
    ended = threading.Event()
    executor.watch(ended.set)
    try:
        engine.submit(request_of(make_prompts([200], seed=6)[0], "b"))
        tokens: list[int] = []
        while engine.has_work():
            outputs = engine.step(wait=False)
            tokens += outputs.token_ids
            if engine.waits:
                assert ended.wait(10), "the end of a step was not told"
                ended.clear()
    finally:
        executor.watch(None)
    assert len(tokens) == 4


@pytest.mark.parametrize("layers", [range(6), range(2, 3), range(1, 5)])
def test_blocks_are_gathered_and_scattered_exactly(layers: range) -> None:
    pool, other = random_pool(1), random_pool(2)
    before = other.clone()
    kv, target = KvCopies(lambda: pool), KvCopies(lambda: other)
    ids, there = [BlockId(i) for i in (5, 63, 0, 17)], [BlockId(i) for i in (1, 2, 60, 3)]
    memory = torch.empty(kv.num_bytes(len(layers), 4), dtype=torch.uint8, device="cuda")
    values = kv.gather(layers, ids, memory)
    assert values.shape == (4, len(layers), *SHAPE[2:])
    target.scatter(layers, there, memory)
    torch.cuda.synchronize()
    words, olds, sources = other.view(torch.int16), before.view(torch.int16), pool.view(torch.int16)
    for layer in range(SHAPE[0]):
        moved = dict(zip(there, ids, strict=True)) if layer in layers else {}
        for block in range(SHAPE[1]):
            expected = sources[layer, moved[block]] if block in moved else olds[layer, block]
            assert torch.equal(words[layer, block], expected)


def take(receiver: BulkReceiver, slot: int, num_bytes: int) -> None:
    receiver.announced(slot, num_bytes)
    receiver.take(slot, num_bytes)


@contextlib.contextmanager
def connected(kind: str, kv: KvCopies) -> Iterator[tuple[Child, BulkReceiver]]:
    path, sender = make_path(kind, kv), other_end(BulkSource, kind)
    receiver = path.accept(sender.call("offer"))
    sender.call("connect", receiver.slots)
    try:
        yield sender, receiver
    finally:
        receiver.close(sender_gone=True)
        sender.kill()
        path.close()


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_pieces_of_another_process_arrive_exactly(kind: str) -> None:
    pool, source = random_pool(2), random_pool(1).view(torch.int16)
    random = np.random.default_rng(0)
    with connected(kind, KvCopies(lambda: pool)) as (sender, receiver):
        for turn in range(20):
            slot = turn % receiver.slots.num_slots
            layer, count, first = int(random.integers(0, 3)), int(random.integers(1, 9)), int(random.integers(0, 64))
            num_layers = int(random.integers(1, 4))
            sender.call("put", layer, num_layers, first, count, slot)
            num_bytes = KvCopies(lambda: pool).num_bytes(num_layers, count)
            take(receiver, slot, num_bytes)
            there = [BlockId(int(block)) for block in random.permutation(SHAPE[1])[:count]]
            assert receiver.write(slot, range(layer, layer + num_layers), there, None).wait(10)
            for index, block in enumerate(there):
                expected = source[layer : layer + num_layers, (first + 7 * index) % SHAPE[1]]
                assert torch.equal(pool.view(torch.int16)[layer : layer + num_layers, block], expected)
        sender.call("wait")
        sender.close()


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_a_dead_sender_leaves_nothing_that_waits(kind: str) -> None:
    pool = random_pool(2)
    before = pool.clone()
    with connected(kind, KvCopies(lambda: pool)) as (sender, receiver):
        sender.kill()
        threading.Timer(0.5, receiver.abort).start()
        with pytest.raises(DataLoss):
            take(receiver, 0, 1 << 16)
    torch.cuda.synchronize()
    assert torch.equal(pool.view(torch.int16), before.view(torch.int16))
    with connected(kind, KvCopies(lambda: pool)) as (sender, receiver):
        sender.call("put", 0, 1, 0, 2, 0)
        take(receiver, 0, 2 * 8192)
        assert receiver.write(0, range(1), [BlockId(0), BlockId(1)], None).wait(10)
        sender.close()


def test_slots_wait_until_their_sender_is_surely_gone() -> None:
    from baton.worker.transfer.kinds.ipc.regions import QUARANTINE_SECONDS, Regions

    now = [0.0]
    regions = Regions(1 << 20, 2, clock=lambda: now[0])
    first, second = regions.take(), regions.take()
    with pytest.raises(ServiceError, match="staging"):
        regions.take()
    regions.give_back(first)
    with pytest.raises(ServiceError, match="staging"):
        regions.take()
    now[0] += QUARANTINE_SECONDS
    assert regions.take() is first
    regions.give_back(first)
    regions.give_back(second)
    regions.close()


def test_unsupported_models_are_reported() -> None:
    pool = random_pool(1)
    kv = KvCopies(lambda: pool)
    with pytest.raises(Mismatch, match="one host"):
        make_path("ipc", kv).accept(b"another")
    with pytest.raises(ServiceError, match="communicator id"):
        make_path("nccl", kv).connect(Slots(3, SLOT_BYTES, b"short"))
    receiver = make_path("ipc", kv).accept(HOST)
    with pytest.raises(ServiceError, match="slot of"):
        receiver.checksum(0, SLOT_BYTES + 1)
    with pytest.raises(ServiceError, match="heads"):
        receiver.write(0, range(1), [BlockId(0)], (0, 2))
    receiver.close(sender_gone=True)
