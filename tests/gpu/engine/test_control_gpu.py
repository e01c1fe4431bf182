"""Sleep, wake-up and reload on a GPU: memory is freed, and later results are the same."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from support.engine.gpu_engines import (
    engine_over,
    executor_for,
    generate,
    leader_of,
    make_model,
    make_prompts,
    tokens_of,
)

from baton.rpc.errors import Mismatch, NoCapacity
from baton.worker.core import BlockId
from baton.worker.executors.cuda.executor import CudaExecutor

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one architecture."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    make_model("llama-128", first, torch.bfloat16)
    other = make_model("llama-128", second, torch.bfloat16)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.flip(0))
    other.to(torch.bfloat16).save_pretrained(second)
    return first, second


@pytest.fixture(params=[True, False], ids=["graphs", "eager"])
def executor(folders: tuple[Path, Path], request: pytest.FixtureRequest) -> CudaExecutor:
    # What earlier tests left in the allocator must not hold the pool: memory that is shared with it cannot go back.
    gc.collect()
    torch.cuda.empty_cache()
    made = executor_for(folders[0], dtype="bfloat16", cuda_graphs=request.param, num_blocks=4096)
    return leader_of(made)


def tokens(executor: CudaExecutor) -> list[list[int]]:
    """What a fresh engine generates: nothing is cached from before."""
    return tokens_of(generate(engine_over(executor), make_prompts()))


def held_bytes() -> int:
    """Returns this process's memory on the device, because others may run there."""
    return torch.cuda.memory_reserved()


@pytest.mark.parametrize("level", [1, 2])
def test_an_executor_that_slept_computes_the_same_and_its_memory_was_free_meanwhile(
    executor: CudaExecutor, level: int
) -> None:
    before = tokens(executor)
    pool = executor.num_blocks * executor.kv_spec.bytes_per_block
    full = held_bytes()
    freed = executor.sleep(level)
    assert freed >= pool
    assert full - held_bytes() >= pool
    assert executor.sleep(level) == 0
    executor.wake(executor.read_weights("") if level == 2 else None)
    assert tokens(executor) == before


def test_level_2_after_level_1_lets_the_weights_go_too(executor: CudaExecutor) -> None:
    before = tokens(executor)
    executor.sleep(1)
    executor.sleep(2)
    executor.wake(executor.read_weights(""))
    assert tokens(executor) == before


def test_weights_reloaded_in_place_are_those_of_a_fresh_executor(
    executor: CudaExecutor, folders: tuple[Path, Path]
) -> None:
    first, second = folders
    expected_first = tokens(executor)
    fresh = executor_for(second, dtype="bfloat16", num_blocks=600)
    expected_second = tokens_of(generate(engine_over(fresh), make_prompts()))
    digest = executor.model.digest
    new = executor.read_weights(str(second))
    assert executor.model.digest == digest
    executor.use_weights(new)
    assert executor.model.digest == executor.kv_spec.model_digest == new.digest == fresh.model.digest != digest
    assert tokens(executor) == expected_second != expected_first
    executor.use_weights(executor.read_weights(str(first)))
    assert tokens(executor) == expected_first


def test_waking_with_other_weights_serves_those(executor: CudaExecutor, folders: tuple[Path, Path]) -> None:
    before = tokens(executor)
    executor.sleep(2)
    executor.wake(executor.read_weights(str(folders[1])))
    assert tokens(executor) != before


def test_another_architecture_is_refused_and_changes_nothing(executor: CudaExecutor, tmp_path: Path) -> None:
    before = tokens(executor)
    make_model("llama-biased-64", tmp_path, torch.bfloat16)
    with pytest.raises(Mismatch, match="another architecture"):
        executor.read_weights(str(tmp_path))
    assert tokens(executor) == before


def test_without_memory_it_stays_asleep_and_can_wake_later(executor: CudaExecutor) -> None:
    before = tokens(executor)
    executor.sleep(1)
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (32 << 20)) / total)
    try:
        with pytest.raises(NoCapacity, match="too little to wake up"):
            executor.wake(None)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    executor.wake(None)
    assert tokens(executor) == before


def test_a_connections_copies_follow_the_pool_that_wake_allocated(executor: CudaExecutor) -> None:
    size = executor.kv_spec.layer_bytes(0)
    lane = executor.kv.lane(1, size)
    full = held_bytes()
    executor.sleep(1)
    assert full - held_bytes() >= executor.num_blocks * executor.kv_spec.bytes_per_block, "the lane kept the old pool"
    executor.wake(None)
    staging = torch.full((size,), 7, dtype=torch.uint8, device="cuda")
    lane.scatter(0, range(1), [BlockId(3)], staging.data_ptr(), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert bytes(executor.read_blocks(0, [BlockId(3)])) == bytes([7]) * size
