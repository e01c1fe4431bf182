"""Qwen3 with experts: Qwen3's attention; some layers may be dense."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import ExpertsSpec, LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers, read_windows
from baton.worker.models.reading_experts import read_router, read_sparse_layers

ARCHITECTURE = "Qwen3MoeForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads layers that may differ in their MLPs."""
    bias, num_layers = fields.flag("attention_bias", default=False), read_num_layers(fields)
    windows = [0] * num_layers
    if fields.flag("use_sliding_window", default=False):
        windows = read_windows(fields, num_layers)
    attention = replace(read_attention(fields), qkv_bias=bias, o_bias=bias, qk_norm="head")
    dense = read_mlp(fields)
    router = replace(read_router(fields), renormalized=fields.flag("norm_topk_prob", default=False))
    experts = ExpertsSpec(router, fields.positive_int("moe_intermediate_size"))
    layers = [
        LayerSpec(replace(attention, window=window), experts if sparse else dense)
        for window, sparse in zip(windows, read_sparse_layers(fields, num_layers), strict=True)
    ]
    return read_model(fields, ARCHITECTURE, layers)


FAMILY = Family(ARCHITECTURE, "qwen3_moe", read)
