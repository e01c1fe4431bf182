"""Granite 3, dense: Llama's layers, with scaled embeddings, scores, residual updates and logits."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers

ARCHITECTURE = "GraniteForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike."""
    bias = fields.flag("attention_bias", default=False)
    scale = fields.positive_float("attention_multiplier", default=1.0)
    attention = replace(read_attention(fields), qkv_bias=bias, o_bias=bias, scale=scale)
    mlp = replace(read_mlp(fields), bias=fields.flag("mlp_bias", default=False))
    layer = LayerSpec(attention, mlp, residual_scale=fields.positive_float("residual_multiplier", default=1.0))
    return read_model(
        fields,
        ARCHITECTURE,
        [layer] * read_num_layers(fields),
        embedding_scale=fields.positive_float("embedding_multiplier", default=1.0),
        logits_divisor=fields.positive_float("logits_scaling", default=1.0),
    )


FAMILY = Family(ARCHITECTURE, "granite", read)
