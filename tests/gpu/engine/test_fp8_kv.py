"""KV in 8 bits: half the memory, nearly the same distribution, scales from the checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.gpu_engines import engine_over, executor_for, generate, make_model, make_prompts

from baton.worker.core import BlockId, SamplingParams
from baton.worker.executors.base import Executor

pytestmark = pytest.mark.gpu

ASKING = SamplingParams(temperature=0.0, logprobs=20)


@pytest.fixture(scope="module", params=["llama-128", "mistral-window-64"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_model(request.param, folder, torch.bfloat16)
    return folder


def distributions(executor: Executor) -> list[dict[int, float]]:
    """Returns the likeliest tokens after each prompt, and after one decoded token."""
    found = generate(engine_over(executor), make_prompts(seed=21), 2, ASKING)
    return [dict(zip(one.top_token_ids, one.top_logprobs, strict=True)) for each in found for one in each.logprobs]


def differences(one: list[dict[int, float]], other: list[dict[int, float]]) -> np.ndarray:
    """Returns differences of log-probabilities after the prompts, for tokens in both."""
    pairs = list(zip(one[::2], other[::2], strict=True))
    return np.array([abs(mine[token] - yours[token]) for mine, yours in pairs for token in mine.keys() & yours.keys()])


def test_distributions_stay_close_to_those_of_16_bits(folder: Path) -> None:
    wide = executor_for(folder, dtype="bfloat16")
    narrow = executor_for(folder, dtype="bfloat16", kv_cache_dtype="fp8_e4m3")
    assert narrow.kv_spec.groups[0].dtype == "float8_e4m3"
    assert 2 * narrow.kv_spec.bytes_per_block == wide.kv_spec.bytes_per_block
    found = differences(distributions(wide), distributions(narrow))
    assert len(found) > 200
    assert found.mean() < 0.03
    assert found.max() < 0.2


def test_the_same_memory_holds_twice_the_blocks(folder: Path) -> None:
    fields = {"dtype": "bfloat16", "num_blocks": 0, "kv_cache_memory": 64 << 20, "cuda_graphs": False}
    wide = executor_for(folder, **fields)
    narrow = executor_for(folder, **fields, kv_cache_dtype="fp8_e4m3")
    assert narrow.num_blocks // 2 == wide.num_blocks


def test_a_checkpoints_scales_are_used(folder: Path, tmp_path: Path) -> None:
    scaled = tmp_path / "scaled"
    scaled.mkdir()
    (scaled / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        for name, value in (("k_scale", 0.25), ("v_scale", 0.5)):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([value])
    save_file(tensors, scaled / "model.safetensors")

    def halves(path: Path) -> tuple[torch.Tensor, torch.Tensor, list[dict[int, float]]]:
        executor = executor_for(path, dtype="bfloat16", kv_cache_dtype="fp8_e4m3")
        found = distributions(executor)
        blocks = [BlockId(block) for block in range(executor.num_blocks)]
        raw = torch.frombuffer(bytearray(executor.read_blocks(0, blocks)), dtype=torch.float8_e4m3fn).float()
        spec = executor.kv_spec
        sides = raw.view(len(blocks), *spec.block_shape(spec.groups[0])).abs()
        return sides[:, 0].sum(), sides[:, 1].sum(), found

    key, value, plain = halves(folder)
    scaled_key, scaled_value, found = halves(scaled)
    assert (scaled_key / key).item() == pytest.approx(4.0, rel=0.05)
    assert (scaled_value / value).item() == pytest.approx(2.0, rel=0.05)
    assert differences(plain, found).mean() < 0.03


def test_computed_scales_hold_values_that_do_not_fit_without(folder: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.mkdir()
    (large / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        tensors[f"model.layers.{layer}.self_attn.v_proj.weight"] *= 2.0**14
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"] /= 2.0**14
    save_file(tensors, large / "model.safetensors")
    fields = {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}
    wide = distributions(executor_for(large, dtype="bfloat16"))
    computed = executor_for(large, **fields, calculate_kv_scales=True, max_num_batched_tokens=512)
    scales = np.array(computed.kv_spec.groups[0].kv_scales).reshape(-1, 2)
    assert (np.log2(scales) % 1 == 0).all()
    assert (scales[:, 1] > 1).all()
    assert differences(wide, distributions(computed)).mean() < 0.03
    assert differences(wide, distributions(executor_for(large, **fields))).mean() > 0.1
    again = executor_for(large, **fields, calculate_kv_scales=True, max_num_batched_tokens=1024)
    assert again.kv_spec.groups[0].kv_scales == computed.kv_spec.groups[0].kv_scales
