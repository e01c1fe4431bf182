"""Every class of architectures in every format has the logits of Transformers with the dequantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.packed.cells import BOUND, CLASSES, Cell, cells, refused_cells, write_cell, write_unpacked
from support.engine.step_harness import Running, StepHarness
from support.engine.tiny_models import prompts
from support.engine.tiny_shape import VOCAB_SIZE

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.core import SamplingParams
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.models.registry import load_config
from baton.worker.weights.build import weight_bytes

COUNT = 4
ALL_LOGITS = SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE)


def executor(path: Path) -> CpuExecutor:
    config = WorkerConfig(
        model=str(path), threads=1, block_size=8, num_blocks=64, max_num_requests=4, logprobs_mode="raw_logits"
    )
    return CpuExecutor(config)


def logits_of(running: Running) -> torch.Tensor:
    """Returns the logits that each token of the output was chosen by, [tokens, vocabulary]."""
    found = torch.empty(COUNT, VOCAB_SIZE)
    for row, one in zip(found, running.logprobs[:COUNT], strict=True):
        row[list(one.top_token_ids)] = torch.tensor(one.top_logprobs)
    return found


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: cell.name)
def test_logits_are_those_of_the_dequantized_weights(cell: Cell, tmp_path: Path) -> None:
    path, oracle = write_cell(cell, tmp_path)
    made = executor(path)
    harness = StepHarness(made)
    running = [harness.admit(prompt, ALL_LOGITS) for prompt in prompts(2, 20)]
    harness.run(COUNT, chunk=9)
    for one in running:
        with torch.no_grad():
            expected = oracle(torch.tensor([one.token_ids])).logits[0, one.num_prompt_tokens - 1 :][:COUNT]
        torch.testing.assert_close(logits_of(one), expected, rtol=0, atol=BOUND * float(expected.abs().max()))
    assert "unquantized" not in made.facts.weight_format or cell.model == "gpt-oss"
    if path.is_dir():
        assert made.facts.weight_bytes == weight_bytes(load_config(path), torch.float32)


@pytest.mark.parametrize("cell", refused_cells(), ids=lambda cell: cell.name)
def test_what_is_not_read_is_refused_by_name(cell: Cell, tmp_path: Path) -> None:
    write_unpacked(cell, tmp_path)
    with pytest.raises(InvalidRequest, match=CLASSES[cell.model].refused[cell.form]):
        executor(tmp_path)
