"""Greedy outputs of GGUF files on the CPU, and their comparison with Transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.engine.step_harness import StepHarness
from support.engine.tiny_models import generate_greedily, prompts
from transformers import PreTrainedModel

from baton.worker.config import WorkerConfig
from baton.worker.executors.cpu.executor import CpuExecutor

_COUNT = 16


def outputs(path: Path, asked: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the tokens after each prompt, computed together in chunks."""
    config = WorkerConfig(model=str(path), threads=1, block_size=8, num_blocks=256, max_num_requests=16)
    harness = StepHarness(CpuExecutor(config))
    running = [harness.admit(list(prompt)) for prompt in asked]
    harness.run(_COUNT, chunk=9)
    return [one.output[:_COUNT] for one in running]


def check_equal(path: Path, model: PreTrainedModel) -> None:
    """Compares the outputs of some prompts with those of a model."""
    asked = prompts(3, 40)
    assert outputs(path, asked) == [generate_greedily(model, prompt, _COUNT) for prompt in asked]
