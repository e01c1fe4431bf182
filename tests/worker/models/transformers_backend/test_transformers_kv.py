"""The KV of Transformers' models lies in Baton's blocks: it can be read as each layer writes it, and used elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine.step_harness import StepHarness
from support.engine.tiny_models import generate_greedily
from support.engine.tiny_transformers_models import save_tiny

from baton.worker.config import WorkerConfig
from baton.worker.core import BlockId, StepPlan
from baton.worker.executors.cpu.executor import CpuExecutor

BLOCK_SIZE = 8
COUNT = 10
PROMPT = list(range(20, 20 + 4 * BLOCK_SIZE))


def harness_of(folder: Path) -> StepHarness:
    return StepHarness(CpuExecutor(WorkerConfig(model=str(folder), threads=1, block_size=BLOCK_SIZE, num_blocks=40)))


@pytest.mark.parametrize("model_type", ["granite_swa", "mellum", "opt", "vaultgemma"])
def test_blocks_that_were_read_here_and_written_there_decode_alike(model_type: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, model_type)
    sender, receiver = harness_of(tmp_path), harness_of(tmp_path)
    first = sender.admit(PROMPT)
    sender.run_step(chunk=12)
    sender.run(1)
    full = (len(PROMPT) - 1) // BLOCK_SIZE
    there = [receiver.free_blocks.pop() for _ in range(full)]
    for layer in range(sender.executor.kv_spec.num_layers):
        data = sender.executor.read_blocks(layer, sender.in_layer(first.block_ids[:full], layer))
        receiver.executor.write_blocks(layer, receiver.in_layer(there, layer), memoryview(data))
    second = receiver.admit(PROMPT, shared_blocks=there)
    receiver.run(COUNT)
    assert second.output == generate_greedily(model, PROMPT, COUNT)


def test_the_hook_sees_each_layer_once_its_kv_is_written(tmp_path: Path) -> None:
    save_tiny(tmp_path, "arcee")
    harness = harness_of(tmp_path)
    running = harness.admit(PROMPT)
    seen: list[tuple[int, bytes]] = []

    def hook(plan: StepPlan, layer: int) -> None:
        seen.append((layer, bytes(harness.executor.read_blocks(layer, running.block_ids))))

    harness.executor.watch_layers(hook)
    harness.run_step()
    assert [layer for layer, _ in seen] == [0, 1, 2]
    for layer, data in seen:
        assert any(data)
        assert harness.executor.read_blocks(layer, running.block_ids) == data


def test_a_step_that_fails_leaves_the_next_one_whole(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "phi")
    harness = harness_of(tmp_path)
    running = harness.admit(PROMPT)

    def fail(plan: StepPlan, layer: int) -> None:
        raise ValueError("the hook fails")

    harness.executor.watch_layers(fail)
    with pytest.raises(ValueError, match="the hook fails"):
        harness.run_step()
    harness.executor.watch_layers(None)
    harness.free(running)
    again = harness.admit(PROMPT, shared_blocks=[])
    harness.run(COUNT)
    assert again.output == generate_greedily(model, PROMPT, COUNT)


def test_windows_are_those_of_the_masks(tmp_path: Path) -> None:
    save_tiny(tmp_path, "exaone4")
    executor = CpuExecutor(WorkerConfig(model=str(tmp_path), threads=1, block_size=BLOCK_SIZE, num_blocks=4))
    assert executor._config.windows == (9, 0, 9)
    assert executor.kv_spec.num_layers == 3
    assert executor.read_blocks(0, [BlockId(0)])
