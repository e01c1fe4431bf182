"""Gemma 2: Gemma's layers with norms of inputs and outputs, soft caps, and windows in every other layer."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import AttentionSpec, LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.families.gemma.gemma import read_around, with_head_dim
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import (
    Family,
    all_but_every,
    read_activation,
    read_attention,
    read_mlp,
    read_num_layers,
    read_windows,
)

ARCHITECTURE = "Gemma2ForCausalLM"
NAMES = TensorNames(
    attention_output_norm="post_attention_layernorm",
    mlp_input_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)


def read(fields: Fields) -> ModelConfig:
    """Reads layers that differ in their windows."""
    fields = with_defaults(fields)
    layer = read_layer(
        fields, replace(read_attention(fields), soft_cap=read_cap(fields, "attn_logit_softcapping", 50.0))
    )
    num_layers = read_num_layers(fields)
    windows = read_windows(fields, num_layers, all_but_every(2, num_layers))
    layers = [replace(layer, attention=replace(layer.grouped, window=window)) for window in windows]
    cap = read_cap(fields, "final_logit_softcapping", 30.0)
    return read_around(fields, ARCHITECTURE, layers, names=NAMES, cap=cap)


def with_defaults(fields: Fields) -> Fields:
    """Returns fields with a head_dim and, where they have no sliding_window, not even null, one of 4096."""
    return with_head_dim(Fields({"sliding_window": 4096, **fields.raw}, fields.source))


def read_layer(fields: Fields, attention: AttentionSpec) -> LayerSpec:
    """Completes a layer."""
    bias = fields.flag("attention_bias", default=False)
    scale = fields.positive_float("query_pre_attn_scalar", default=256.0) ** -0.5
    mlp = read_mlp(fields, read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"))
    return LayerSpec(replace(attention, qkv_bias=bias, o_bias=bias, scale=scale), mlp, output_norms=True)


def read_cap(fields: Fields, key: str, default: float) -> float:
    """Reads a soft cap: 0 for null, the default where the field is absent."""
    if fields.raw.get(key) is None:
        return 0.0 if key in fields.raw else default
    return fields.positive_float(key)


FAMILY = Family(ARCHITECTURE, "gemma2", read)
