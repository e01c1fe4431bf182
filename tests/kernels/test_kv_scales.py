"""Scales that the CUDA executor computes at start fit the keys and values that Transformers has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.interpreted_card import use_interpreted_card
from support.engine.step_harness import StepHarness
from support.engine.tiny_models import load_transformers, make_model

from baton.worker.config import WorkerConfig
from baton.worker.core import SamplingParams
from baton.worker.executors.base import ServingExecutor
from baton.worker.executors.cuda.start import start_cuda_executor
from baton.worker.executors.kv_scales import scale_plans
from baton.worker.layers.kv_scale_meter import E4M3_MAX, HEADROOM

pytestmark = pytest.mark.interpreted

LARGE = 2.0**11  # what the values of one layer are multiplied by
PROMPT = [7, 8, 9, 10]


def executor(folder: Path, **fields: object) -> ServingExecutor:
    config = {"executor": "cuda", "dtype": "float16", "max_num_requests": 2, "num_blocks": 16, "max_model_len": 17}
    return start_cuda_executor(WorkerConfig(model=str(folder), cuda_graphs=False, **config, **fields))  # type: ignore[arg-type]


def logprob(one: ServingExecutor) -> list[float]:
    harness = StepHarness(one)
    request = harness.admit(PROMPT, SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=(1, 2, 3, 4)))
    harness.run(2)
    return [value for entry in request.logprobs for value in entry.top_logprobs]


def test_computed_scales_fit_the_models_keys_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    prefix = "model.layers.1.self_attn."
    tensors[f"{prefix}v_proj.weight"] *= LARGE
    tensors[f"{prefix}o_proj.weight"] /= LARGE
    save_file(tensors, path)
    use_interpreted_card(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    wide = logprob(executor(tmp_path))
    fp8 = executor(tmp_path, kv_cache_dtype="fp8_e4m3", calculate_kv_scales=True)
    assert not fp8._batch.block_table.any()  # type: ignore[attr-defined]
    scales = torch.tensor(fp8.kv_spec.groups[0].kv_scales).view(-1, 2)
    expected = largest(tmp_path, fp8).flatten().tolist()
    for scale, most in zip(scales.flatten().tolist(), expected, strict=True):
        assert scale * E4M3_MAX >= most * HEADROOM * 0.99
        assert scale * E4M3_MAX <= most * HEADROOM * 2.02
    assert scales[1, 1] > 1 > scales[0, 1]
    unscaled = executor(tmp_path, kv_cache_dtype="fp8_e4m3")
    assert 4 * distance(logprob(fp8), wide) < distance(logprob(unscaled), wide)


def distance(one: list[float], other: list[float]) -> float:
    return float(np.abs(np.subtract(one, other)).mean())


def largest(folder: Path, one: ServingExecutor) -> torch.Tensor:
    """Returns the largest keys and values of Transformers for the same tokens, [num_layers, 2]."""
    model = load_transformers(folder)
    plans = scale_plans(one.model.vocab_size, one.model.max_model_len, 16, 2048)
    found = []
    for plan in plans:
        tokens = torch.from_numpy(plan.admitted[0].token_ids).long()[None]
        with torch.inference_mode():
            cache = model(tokens, use_cache=True).past_key_values
        found.append([[layer.keys.abs().max(), layer.values.abs().max()] for layer in cache.layers])
    return torch.tensor(found).amax(0)
