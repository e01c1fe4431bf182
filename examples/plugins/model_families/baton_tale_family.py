"""Tale: Qwen 2's layers, with embeddings that the config scales."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers

ARCHITECTURE = "TaleForCausalLM"


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike, with biases of queries, keys and values."""
    attention = replace(read_attention(fields), qkv_bias=True)
    layers = [LayerSpec(attention, read_mlp(fields))] * read_num_layers(fields)
    scale = fields.positive_float("embedding_scale", default=1.0)
    return read_model(fields, ARCHITECTURE, layers, embedding_scale=scale)


FAMILY = Family(ARCHITECTURE, "tale", read)
