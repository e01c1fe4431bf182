"""A start runs each kernel of packed linears and of experts that some later step takes, with each of its tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from baton.kernels.linear.quantized.choice import kernel_for
from baton.kernels.linear.quantized.fp8_few import choose_fp8_tiling
from baton.kernels.moe.experts_fp8 import choose_cut
from baton.kernels.moe.tiling import choose_tile
from baton.kernels.table import Case, find
from baton.worker.executors.cuda.startup.warm_up_sizes import warm_up_sizes
from baton.worker.layers.self_check import packed_parts
from baton.worker.models.config import ModelConfig
from baton.worker.models.presets import PRESETS
from baton.worker.models.registry import parse_config
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.weights.build import build_weights

META, HOPPER = torch.device("meta"), Case("cuda", 9, torch.bfloat16)
MOST = 8192
SHARED = 227 * 1024


def model_of(preset: str) -> tuple[ModelConfig, Any]:
    config = parse_config({**PRESETS[preset], "num_hidden_layers": 1}, preset)
    return config, build_weights(config, lambda name, shape, into: None, torch.bfloat16, META)


def compiled(config: ModelConfig, weights: Any, num_tokens: int) -> tuple[Any, ...]:
    """Returns the kernels of a step, with what their own modules cut."""
    found: list[Any] = []
    for method, params in packed_parts(weights):
        if isinstance(method, PackedMethod):
            weight = method.packed_weight(params)
            columns = next(iter(params.values())).shape[1]
            kernel = kernel_for(num_tokens, weight, columns, has_scaled_mm=True)
            parts = {"TWO_PARTS": 2, "FEW_ROUNDED": 1}.get(kernel.name, 0)
            tiling = parts and choose_fp8_tiling(num_tokens * parts, weight.num_rows, columns, weight.group)
            found.append((kernel, tiling))
    experts = config.experts
    if experts is not None:
        pairs, count = num_tokens * experts.router.top_k, experts.router.num_experts
        row = find("run_experts", Case("cuda", 9, num_pairs=pairs, num_experts=count, weights="rounding"))
        few = {"run_split_experts": 2, "run_few_rounded_experts": 1}.get(row.path.rpartition(":")[2])
        tile = choose_tile(pairs, count) if few is None else choose_cut(pairs, count, few, SHARED)
        found.append((row, tile))
    return tuple(found)


@pytest.mark.parametrize("preset", ["qwen3-30b-a3b-fp8", "llama-3.1-8b-fp8", "llama-3.1-8b-w4a16"])
def test_every_step_finds_its_kernels_compiled(preset: str) -> None:
    config, weights = model_of(preset)
    sizes = warm_up_sizes(config, weights, HOPPER, MOST, META)
    assert len(sizes) <= 32
    # Each kernel by itself: a step that takes new ones together compiles none.
    known = {one for size in sizes for one in enumerate(compiled(config, weights, size))}
    for num_tokens in range(1, MOST + 1):
        missing = set(enumerate(compiled(config, weights, num_tokens))) - known
        assert not missing, (num_tokens, missing)


def test_a_model_without_experts_or_packed_weights_needs_none() -> None:
    assert warm_up_sizes(*model_of("llama-3.1-8b"), HOPPER, MOST, META) == []
