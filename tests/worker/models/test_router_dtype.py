"""Routers have the dtype, and choose the experts, that they have in Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.tiny_models import make_model
from support.engine.tiny_moe_models import MOE_MODELS
from transformers import AutoModelForCausalLM

from baton.worker.layers.cpu.device import CpuDevice
from baton.worker.layers.cpu.kv import PagedKv
from baton.worker.layers.experts import Experts, ExpertsWeights
from baton.worker.layers.spec import ExpertsSpec
from baton.worker.models.weights import ModelWeights
from baton.worker.quantization.neighbours import Stream
from baton.worker.weights.loading import load_model


@dataclass
class Pair:
    """The last layer with experts, of one model in bf16."""

    layer: Any  # in Transformers
    spec: ExpertsSpec
    weights: ExpertsWeights
    ours: Experts


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    make_model(request.param, tmp_path)
    ours = load_model(str(tmp_path), "auto", torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert isinstance(ours.weights, ModelWeights)
    both = zip(ours.config.layers, ours.weights.layers, theirs.model.layers, strict=True)
    spec, weights, layer = [
        (spec.mlp, weights.mlp, layer) for spec, weights, layer in both if isinstance(spec.mlp, ExpertsSpec)
    ][-1]
    assert isinstance(weights, ExpertsWeights)
    assert isinstance(spec, ExpertsSpec)
    device = CpuDevice(PagedKv([torch.zeros(1, 2, 1, 8, 16, dtype=torch.bfloat16)]), {})
    with torch.inference_mode():
        yield Pair(layer, spec, weights, Experts(spec, weights, ours.config.norm, 1.0, device))


@pytest.mark.parametrize("pair", sorted(name for name in MOE_MODELS if "-" not in name), indirect=True)
def test_a_router_has_the_dtype_of_transformers(pair: Pair) -> None:
    (theirs,) = [
        tensor
        for name, tensor in pair.layer.named_parameters()
        if name.endswith((".gate.weight", ".router.weight", ".router.layer.weight"))
    ]
    router = pair.weights.router.params["weight"]
    assert (router.dtype, router.tolist()) == (theirs.dtype, theirs.tolist())


@pytest.mark.parametrize("pair", ["glm4_moe", "ernie4_5_moe"], indirect=True)
def test_tokens_have_the_experts_of_transformers_although_logits_are_close(pair: Pair) -> None:
    """Compares sums of many tokens, which differ for a token with other experts."""
    x = torch.randn(2000, pair.layer.input_layernorm.weight.numel(), generator=torch.Generator().manual_seed(7))
    x = x.bfloat16()
    theirs = pair.layer.mlp(pair.layer.post_attention_layernorm(x)[None])[0]
    stream = Stream(torch.zeros_like(x))
    stream.add(x)
    pair.ours.add(stream)
    ours = stream.settled() - x
    assert not bool(((ours - theirs).abs().amax(-1) > 0.1 * theirs.abs().amax(-1) + 0.02).any())
