"""Host memory for a GPU's pool: blocks are restored bit for bit, tokens are the same, and staging never overflows."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engine.gpu_engines import engine_over, executor_for, generate, make_model, make_prompts, tokens_of

from baton.worker.core import BlockId, HostSlot
from baton.worker.executors.base import Executor, LandedCopies, RestoreCopy
from baton.worker.executors.cuda.kv.host_cache import HostCache

pytestmark = pytest.mark.gpu

_WAIT_SECONDS = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-128")
    make_model("llama-128", folder, torch.bfloat16)
    return folder


def host_of(executor: Executor) -> HostCache:
    assert isinstance(executor.host, HostCache)
    return executor.host


def wait_for(host: HostCache, num_slots: int = 0, num_restores: int = 0) -> LandedCopies:
    """Until so much has landed."""
    landed = LandedCopies()
    deadline = time.monotonic() + _WAIT_SECONDS
    while len(landed.slots) < num_slots or len(landed.restores) < num_restores:
        assert time.monotonic() < deadline, f"only {landed} has landed"
        host.wait(1e-3)
        more = host.poll()
        landed.slots += more.slots
        landed.restores += more.restores
        landed.offload_seconds += more.offload_seconds
    return landed


def fill(executor: Executor, block_ids: list[BlockId], seed: int | None) -> list[bytes]:
    """Random bytes, or zeros, in every layer of these blocks."""
    layers = []
    for layer in range(executor.kv_spec.num_layers):
        size = len(block_ids) * executor.kv_spec.layer_bytes(0)
        data = bytes(size) if seed is None else np.random.default_rng([seed, layer]).bytes(size)
        executor.write_blocks(layer, block_ids, memoryview(data))
        layers.append(data)
    return layers


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_blocks_are_restored_bit_for_bit(folder: Path, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = executor_for(folder, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, host_cache_gb=0.05)
    host = host_of(executor)
    monkeypatch.setattr(host, "_piece", 4)
    block_ids = [BlockId(number) for number in (3, 9, 4, 100, 7, 8, 1, 50, 51)]
    slots = [HostSlot(number) for number in (5, 6, 7, 20, 2, 1, 0, 30, 31)]
    expected = fill(executor, block_ids, seed=1)
    host.offload(list(zip(block_ids, slots, strict=True)))
    landed = wait_for(host, num_slots=len(slots))
    assert sorted(landed.slots) == sorted(slots)
    assert landed.offload_seconds > 0
    fill(executor, block_ids, seed=None)
    others = [BlockId(number) for number in range(200, 209)]
    host.restore(RestoreCopy(1, tuple(zip(slots, others, strict=True)), fenced=True))
    host.restore(RestoreCopy(2, tuple(zip(slots, block_ids, strict=True)), fenced=False))
    assert [restore_id for restore_id, _ in wait_for(host, num_restores=2).restores] == [1, 2]
    for layer, data in enumerate(expected):
        assert bytes(executor.read_blocks(layer, others)) == data
        assert bytes(executor.read_blocks(layer, block_ids)) == data


def test_staging_goes_round_and_round(folder: Path) -> None:
    executor = executor_for(folder, dtype="bfloat16", host_cache_gb=0.05)
    host = host_of(executor)
    whole = host.capacity()
    assert whole > 3
    count = whole * 2 // 3
    for number in range(8):
        block_ids = [BlockId(100 + index) for index in range(count)]
        expected = fill(executor, block_ids, seed=number)
        slots = [HostSlot(number + index) for index in range(count)]
        host.offload(list(zip(block_ids, slots, strict=True)))
        assert host.capacity() == whole - count
        wait_for(host, num_slots=count)
        assert host.capacity() == whole
        fill(executor, block_ids, seed=None)
        host.restore(RestoreCopy(number, tuple(zip(slots, block_ids, strict=True)), fenced=False))
        wait_for(host, num_restores=1)
        for layer, data in enumerate(expected):
            assert bytes(executor.read_blocks(layer, block_ids)) == data


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_are_the_same_with_and_without_host_memory(folder: Path, cuda_graphs: bool) -> None:
    fields = {"dtype": "bfloat16", "batch_invariant": True, "cuda_graphs": cuda_graphs}
    prompts = make_prompts(seed=5)
    plain = engine_over(executor_for(folder, **fields), cache_outputs=False)
    expected = tokens_of(generate(plain, prompts))
    executor = executor_for(folder, num_blocks=90, host_cache_gb=0.2, **fields)
    engine = engine_over(executor, cache_outputs=False, min_host_hit_tokens=0)
    for stagger in (0, 1, 3):
        assert tokens_of(generate(engine, prompts, stagger=stagger)) == expected
    counters = engine.counters()
    assert counters.num_offloaded_blocks > 20
    assert counters.num_host_hit_tokens > 0
    assert counters.num_restored_bytes == counters.num_restored_blocks * executor.kv_spec.bytes_per_block
    audit = engine.audit()
    assert (audit.num_held_blocks, audit.num_leased_blocks) == (0, 0)
