"""Ministral 3: Mistral's layers; queries far into a sequence are scaled up."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers, read_windows
from baton.worker.models.reading_rope import RopeDefaults, read_rope

ARCHITECTURE = "Ministral3ForCausalLM"
_ROPE = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike without biases."""
    absent = {"head_dim": 128, "max_position_embeddings": 262144, "rope_parameters": _ROPE}
    fields = Fields({**absent, **fields.raw}, fields.source)
    attention = read_attention(fields, read_rope(fields, RopeDefaults(scales_queries=True)))
    windows = read_windows(fields, read_num_layers(fields))
    layers = [LayerSpec(replace(attention, window=window), read_mlp(fields)) for window in windows]
    return read_model(fields, ARCHITECTURE, layers, default_eps=1e-5)


FAMILY = Family(ARCHITECTURE, "ministral3", read)
