"""One pair among thousands is found in KV of 8 bits as in the model's own dtype. 128 k: tests/gpu/engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.needle import asked, haystack, write_needle_model

from baton.worker.config import WorkerConfig
from baton.worker.core import Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.scheduling.settings import EngineSettings

NUM_TOKENS = 8192
TOKEN_IDS, QUESTIONS = haystack(NUM_TOKENS, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("needle")
    write_needle_model(folder, 2 * NUM_TOKENS)
    return folder


def answers(folder: Path, **fields: Any) -> list[int]:
    """Returns the token after each question. The first one computes the haystack, which the others find cached."""
    config = WorkerConfig(model=str(folder), block_size=32, num_blocks=320, max_num_requests=32, threads=1, **fields)
    engine = Engine(CpuExecutor(config), EngineSettings(max_num_requests=32, max_num_batched_tokens=2048), epoch=1)
    prompts = asked(QUESTIONS, TOKEN_IDS)
    found = []
    for some in (prompts[:1], prompts[1:]):
        requests = [
            Request(str(index), prompt, len(prompt), SamplingParams(temperature=0.0), StopConditions(1), bytes(16))
            for index, prompt in enumerate(some)
        ]
        for request in requests:
            engine.submit(request)
        while engine.has_work():
            assert not engine.step().failures
        found += [request.token_ids[-1] for request in requests]
    return found


@pytest.mark.parametrize(
    "fields", [{}, {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e4m3", "calculate_kv_scales": True}]
)
def test_every_pair_is_found_wherever_it_lies(fields: dict[str, Any], folder: Path) -> None:
    assert answers(folder, **fields) == [one.answer for one in QUESTIONS]


def test_keys_that_vanish_when_rounded_are_not_found(folder: Path, tmp_path: Path) -> None:
    write_needle_model(tmp_path, 2 * NUM_TOKENS)
    path = tmp_path / "model.safetensors"
    scales = {"model.layers.0.self_attn.k_scale": 1e5, "model.layers.0.self_attn.v_scale": 1.0}
    save_file({**load_file(path), **{name: torch.tensor(value) for name, value in scales.items()}}, path)
    found = answers(tmp_path, kv_cache_dtype="fp8_e4m3")
    assert sum(one == question.answer for one, question in zip(found, QUESTIONS, strict=True)) < 8
