"""What blocks held before, such as the bits of a state, is in no token of a model with states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.engine_harness import make_request, make_rig
from support.engine.tiny_models import generate_greedily, make_model, prompts
from support.engine.tiny_state_models import STATE_MODELS

from baton.worker.config import WorkerConfig
from baton.worker.executors.cpu.executor import CpuExecutor


def executor_in(folder: Path, **values: object) -> CpuExecutor:
    config = {"threads": 1, "block_size": 16, "num_blocks": 90, "max_num_requests": 4, **values}
    return CpuExecutor(WorkerConfig(model=str(folder), **config))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", STATE_MODELS)
def test_tokens_are_those_of_transformers_in_memory_full_of_nan(name: str, tmp_path: Path) -> None:
    """In chunks that end within blocks, beside decodes, and again from a prefix."""
    model = make_model(name, tmp_path)
    executor = executor_in(tmp_path)
    executor._memory.values[:, :-1].view(torch.uint8).fill_(0xFF)
    rig = make_rig(executor, max_num_batched_tokens=24, max_num_requests=4)
    asked = [*prompts(4, 70, seed=2), [5, 6]]
    for turn in range(2):
        requests = [make_request([*prompt, *[7, 8, 9][:turn]], 20) for prompt in asked]
        rig.run(*requests)
        for request in requests:
            prompt = list(request.token_ids[: request.num_prompt_tokens])
            assert rig.seen.tokens[request.request_id] == generate_greedily(model, prompt, 20)


def test_in_16_bits_no_state_in_a_reused_block_fails_a_request(tmp_path: Path) -> None:
    """Half of a state's values in fp32 are any bits as values of 16: one in 256 is infinite or NaN."""
    make_model("qwen3_next", tmp_path)
    rig = make_rig(executor_in(tmp_path, dtype="bfloat16"), max_num_batched_tokens=64, max_num_requests=4)
    for turn in range(3):
        requests = [make_request(prompt, 20) for prompt in prompts(12, 100, seed=turn)]
        rig.run(*requests)
        assert not rig.seen.failures
        assert all(len(rig.seen.tokens[request.request_id]) == 20 for request in requests)
