"""Every family loads every way of packing: each linear, and each expert, is that of the weights that are meant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import pytest
import torch
from support.engine.packed.models import FORMATS
from support.engine.packed.weights import Packed
from support.engine.tiny_models import MODELS
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.layers.experts import StackedWeights
from baton.worker.layers.linear import LinearWeights
from baton.worker.layers.spec import NO_MLP
from baton.worker.models.config import ModelConfig
from baton.worker.models.names import Layout
from baton.worker.models.registry import parse_config
from baton.worker.quantization.base import Params, QuantMethod
from baton.worker.quantization.experts import DOWN, GATE_UP
from baton.worker.quantization.quantized.experts import PackedExperts
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.quantization.quantized.per_part import PerPart
from baton.worker.weights.build import build_weights

WAYS = (
    "fp8-tensor",
    "fp8-blocks",
    "compressed-fp8-channel",
    "compressed-int8",
    "awq",
    "gptq-order",
    "compressed-nvfp4",
)
# One row of each family, without its variants; and experts without gates.
NAMES = [*(name for name in MODELS if "-" not in name), "nemotron_h-experts"]


@cache
def raw_config(name: str) -> dict[str, Any]:
    """Returns a config.json whose sizes groups divide."""
    model = MODELS[name]()
    raw = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    divided = ("intermediate_size", "lora_rank")
    sizes = {key: 64 for key, value in raw.items() if key.endswith(divided) and value and value % 32}
    if "v_head_dim" in raw:
        sizes["v_head_dim"] = 16
    if "linear_head_dim" in raw:
        sizes |= {"linear_head_dim": 32, "linear_num_heads": 8}
    return {**raw, **sizes}


@cache
def unquantized(name: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Returns the config without a format, and random tensors by the checkpoint's names."""
    config = parse_config(raw_config(name), name)
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}

    def source(wanted: str, shape: tuple[int, ...], into: Tensor) -> None:
        tensors[wanted] = torch.randn(shape, generator=generator) * 0.1

    build_weights(config, source, torch.float32, torch.device("meta"))
    return config, tensors


def pack(weight: Tensor, way: str) -> Packed:
    if weight.dim() == 2:
        return FORMATS[way].pack(weight)
    each = [FORMATS[way].pack(one) for one in weight]
    stacks = {ending: torch.stack([one.tensors[ending] for one in each]) for ending in each[0].tensors}
    return Packed(stacks, torch.stack([one.weight for one in each]))


def check(packed: Any, meant: Any) -> int:
    """Compares two trees of weights. Returns how many linears are packed."""
    if isinstance(packed, LinearWeights):
        found = list(dequantized(packed.method, packed.params, meant.params["weight"]))
        if found:
            torch.testing.assert_close(torch.cat(found), meant.params["weight"], rtol=1e-6, atol=1e-7)
        return len(found)
    if isinstance(packed, StackedWeights):
        return check_experts(packed, meant)
    if isinstance(packed, tuple):
        return sum(check(*pair) for pair in zip(packed, meant, strict=True))
    if is_dataclass(packed):
        return sum(check(getattr(packed, one.name), getattr(meant, one.name)) for one in fields(packed))
    return 0


def dequantized(method: QuantMethod, params: Params, meant: Tensor) -> Iterator[Tensor]:
    if isinstance(method, PackedMethod):
        yield method.dequantized(params, slice(0, method.out_features(params)))
    elif isinstance(method, PerPart):
        for part, own in method.split(params):
            yield from dequantized(part, own, meant)


def check_experts(packed: StackedWeights, meant: StackedWeights) -> int:
    if not isinstance(packed.method, PackedExperts):
        return 0
    for expert in range(len(meant.params[DOWN])):
        linears = dict(zip((GATE_UP, DOWN), packed.method.split(packed.params, expert), strict=True))
        for linear, (method, params) in linears.items():
            expected = meant.params[linear][expert]
            found = torch.cat(list(dequantized(method, params, expected)))
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    return 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_linears_are_those_that_the_packed_ones_mean(name: str, way: str) -> None:
    plain, tensors = unquantized(name)
    raw = {**raw_config(name), "quantization_config": dict(FORMATS[way].settings)}
    if plain.names.layout is not Layout.ROWS:
        with pytest.raises(InvalidRequest, match="stores linears in another order than weight formats"):
            parse_config(raw, name)
        return
    config = parse_config(raw, name)
    made: dict[str, Packed] = {}

    def packed(wanted: str, shape: tuple[int, ...], into: Tensor) -> None:
        if wanted in tensors and into.dtype is torch.float32:
            into.copy_(tensors[wanted].view(into.shape))
            return
        stem = next(one for one in stems if wanted.startswith(f"{one}."))
        if stem not in made:
            made[stem] = pack(tensors[f"{stem}.weight"], way)
        ending = wanted.removeprefix(stem)
        found = made[stem].tensors
        into.copy_(found.get(ending, found.get(ending.removesuffix("_inv"), torch.empty(0))).reshape(into.shape))

    def meant(wanted: str, shape: tuple[int, ...], into: Tensor) -> None:
        stem = wanted.removesuffix(".weight")
        values = made[stem].weight if stem in made and wanted.endswith(".weight") else tensors[wanted]
        into.copy_(values.reshape(into.shape))

    stems = [one.removesuffix(".weight") for one in tensors if one.endswith(".weight")]
    if plain.names.experts.transposed:
        with pytest.raises(InvalidRequest, match="experts whose matrices are transposed or alternate"):
            build_weights(config, packed, torch.float32)
        return
    weights = build_weights(config, packed, torch.float32)
    count = check(weights, build_weights(plain, meant, torch.float32))
    least = sum(2 if layer.mlp is NO_MLP else 4 for layer in plain.layers)
    assert count >= least
    assert len(made) >= least
