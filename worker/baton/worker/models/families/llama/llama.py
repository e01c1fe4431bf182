"""Llama 2 and 3, and models of the same architecture."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers

ARCHITECTURE = "LlamaForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike, with biases if the config sets them."""
    bias = fields.flag("attention_bias", default=False)
    attention = replace(read_attention(fields), qkv_bias=bias, o_bias=bias)
    mlp = replace(read_mlp(fields), bias=fields.flag("mlp_bias", default=False))
    return read_model(fields, ARCHITECTURE, [LayerSpec(attention, mlp)] * read_num_layers(fields))


FAMILY = Family(ARCHITECTURE, "llama", read)
