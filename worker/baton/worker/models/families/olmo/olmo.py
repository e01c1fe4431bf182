"""OLMo 1: Llama's layers with LayerNorm that has no weights; queries, keys and values may be clipped."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers

ARCHITECTURE = "OlmoForCausalLM"
_NORM = NormSpec(1e-5, centered=True, weighted=False)


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike."""
    bias = fields.flag("attention_bias", default=False)
    clips = fields.raw.get("clip_qkv") is not None
    clip = fields.positive_float("clip_qkv") if clips else 0.0
    attention = replace(read_attention(fields), qkv_bias=bias, o_bias=bias, qkv_clip=clip)
    layers = [LayerSpec(attention, read_mlp(fields))] * read_num_layers(fields)
    return read_model(fields, ARCHITECTURE, layers, norm=_NORM)


FAMILY = Family(ARCHITECTURE, "olmo", read)
