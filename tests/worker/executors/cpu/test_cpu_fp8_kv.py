"""KV in 8 bits on a CPU: a quarter of the memory, and the logits of Transformers with such a cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.encoder_models import MAKERS
from support.engine.random_vectors import with_random_vectors
from support.engine.step_harness import StepHarness
from support.engine.tiny_models import MODELS, prompts
from support.engine.tiny_shape import VOCAB_SIZE
from transformers import DynamicCache, PreTrainedModel

from baton.rpc.errors import InvalidRequest, Mismatch
from baton.worker.config import WorkerConfig
from baton.worker.core import SamplingParams
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.executors.kv_scales import scale_plans
from baton.worker.layers.kv_scale_meter import E4M3_MAX, HEADROOM

ASKING = SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE)
COUNT = 4
LARGE = 2.0**14  # what the values of one layer are multiplied by
PROMPTS = prompts(3, 30)
SCALES = ((0.05, 0.11), (0.02, 0.3), (1.5, 0.004))  # of keys and values, of each layer


Logits = list[tuple[list[int], int, torch.Tensor]]


class RoundedCache(DynamicCache):
    """Keeps keys and values in e4m3, by PyTorch's own rounding."""

    def __init__(self, scales: Sequence[tuple[float, float]]) -> None:
        super().__init__()
        self._scales = scales

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *rest: Any, **more: Any) -> Any:
        rounded = [
            (each / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale
            for each, scale in zip((keys, values), self._scales[layer], strict=True)
        ]
        return super().update(*rounded, layer, *rest, **more)


def write(folder: Path, name: str) -> PreTrainedModel:
    model = with_random_vectors(MODELS[name], seed=2)
    model.save_pretrained(folder)
    return model


def add_scales(folder: Path, scales: Any = SCALES) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer, pair in enumerate(scales):
        for key, value in zip(("k_scale", "v_scale"), pair, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{key}"] = torch.tensor([value])
    save_file(tensors, path)


def executor(folder: Path, **fields: Any) -> CpuExecutor:
    config: dict[str, Any] = {"threads": 1, "block_size": 8, "num_blocks": 96, "max_num_requests": 4}
    config |= {"kv_cache_dtype": "fp8_e4m3", "logprobs_mode": "raw_logits"} | fields
    return CpuExecutor(WorkerConfig(model=str(folder), **config))


def logits(made: CpuExecutor) -> Logits:
    """Returns the tokens of some requests, the lengths of their prompts, and the logits after these."""
    harness = StepHarness(made)
    running = [harness.admit(prompt, ASKING) for prompt in PROMPTS]
    harness.run(COUNT, chunk=9)
    found = []
    for one in running:
        rows = torch.empty(COUNT, VOCAB_SIZE)
        for row, each in zip(rows, one.logprobs[:COUNT], strict=True):
            row[list(each.top_token_ids)] = torch.tensor(each.top_logprobs)
        found.append((one.token_ids, one.num_prompt_tokens, rows))
    return found


# With biases, norms of keys, caps, windows in groups of their own, sinks and experts.
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gpt_oss", "olmo3"])
def test_logits_are_those_of_transformers_with_keys_and_values_in_8_bits(name: str, tmp_path: Path) -> None:
    model = write(tmp_path, name)
    scales = [SCALES[layer % len(SCALES)] for layer in range(model.config.num_hidden_layers)]
    add_scales(tmp_path, scales)
    made = executor(tmp_path)
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    for token_ids, start, found in logits(made):
        with torch.no_grad():
            given = {argument: RoundedCache(scales), "use_cache": True}
            expected = model(torch.tensor([token_ids]), **given).logits[0, start - 1 :][:COUNT]
        # A value between two numbers of 8 bits may be rounded either way after sums in another order.
        error = (found - expected).abs().amax(1) / expected.abs().max()
        assert float(error.median()) <= 1e-4
        assert float(error.max()) <= 2e-2


def test_the_same_memory_holds_four_times_the_blocks(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    fields = {"num_blocks": 0, "kv_cache_memory": 1 << 22}
    wide, narrow = executor(tmp_path, kv_cache_dtype="auto", **fields), executor(tmp_path, **fields)
    assert narrow.num_blocks // 4 == wide.num_blocks
    assert narrow.kv_spec.groups[0].dtype == "float8_e4m3"


def test_a_checkpoint_s_scales_are_used(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    add_scales(tmp_path)
    made = executor(tmp_path)
    assert made.kv_spec.groups[0].kv_scales == pytest.approx([one for pair in SCALES for one in pair])
    other = tmp_path / "other"
    other.mkdir()
    write(other, "llama")
    with pytest.raises(Mismatch, match="scales its quantized KV in another way"):
        made.read_weights(str(other))


def test_computed_scales_hold_values_that_do_not_fit_without(tmp_path: Path) -> None:
    model = write(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    prefix = "model.layers.1.self_attn."
    tensors[f"{prefix}v_proj.weight"] *= LARGE
    tensors[f"{prefix}o_proj.weight"] /= LARGE
    save_file(tensors, path)
    computed = executor(tmp_path, calculate_kv_scales=True)
    scales = np.array(computed.kv_spec.groups[0].kv_scales).reshape(-1, 2)
    assert (np.log2(scales) % 1 == 0).all()
    expected = largest(model, computed)
    expected[1, 1] *= LARGE
    assert (scales * E4M3_MAX >= expected * HEADROOM * 0.99).all()
    assert (scales * E4M3_MAX <= expected * HEADROOM * 2.02).all()
    wide = logits(executor(tmp_path, kv_cache_dtype="auto"))
    near, far = (distance(logits(one), wide) for one in (computed, executor(tmp_path)))
    assert 4 * near < far


def largest(model: PreTrainedModel, made: CpuExecutor) -> np.ndarray:
    """Returns the largest keys and values of Transformers for the tokens of the start, [num_layers, 2]."""
    found = []
    for plan in scale_plans(made.model.vocab_size, made.model.max_model_len, 8, 2048):
        tokens = torch.from_numpy(plan.admitted[0].token_ids).long()[None]
        with torch.no_grad():
            cache = model(tokens, use_cache=True).past_key_values
        found.append([[float(one.keys.abs().max()), float(one.values.abs().max())] for one in cache.layers])
    return np.array(found).max(0)


def distance(
    some: list[tuple[list[int], int, torch.Tensor]], others: list[tuple[list[int], int, torch.Tensor]]
) -> float:
    """Returns the mean difference of the logits after the prompts."""
    pairs = zip(some, others, strict=True)
    return float(np.mean([float((one[2][0] - other[2][0]).abs().mean()) for one, other in pairs]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_scales_that_nothing_can_be_divided_by_are_refused(value: float, tmp_path: Path) -> None:
    write(tmp_path, "llama")
    add_scales(tmp_path, ((0.1, 0.1), (0.1, value), (0.1, 0.1)))
    with pytest.raises(InvalidRequest, match=r"layer 1's KV are 0\.1.* of keys and .* of values; each must be one"):
        executor(tmp_path)
    executor(tmp_path, calculate_kv_scales=True)
    executor(tmp_path, kv_cache_dtype="auto")


def test_scales_of_each_head_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    for key in ("k_scale", "v_scale"):
        tensors[f"model.layers.0.self_attn.{key}"] = torch.tensor([0.5, 0.25])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequest, match="layer 0's KV are nan of keys and nan of values; each must be one number"):
        executor(tmp_path)


def test_a_model_without_kv_refuses_the_setting(tmp_path: Path) -> None:
    MAKERS["bert"]().save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match=r"kv_cache_dtype=fp8_e4m3: .* keeps no KV; it must be auto"):
        executor(tmp_path, num_blocks=0)


def test_latent_attention_refuses_the_setting(tmp_path: Path) -> None:
    MODELS["deepseek_v2"]().save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match="keeps one vector a token, which is not rounded; it must be auto"):
        executor(tmp_path)
