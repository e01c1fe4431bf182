"""GLM-4-9B of 2024: Llama's layers; RoPE turns pairs of neighbours in a part of each head."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers
from baton.worker.models.reading_rope import RopeDefaults, read_rope

ARCHITECTURE = "GlmForCausalLM"
_NAMES = TensorNames(gate_up=("mlp.gate_up_proj",))


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike."""
    attention = read_attention(fields, read_rope(fields, RopeDefaults(partial=0.5, interleaved=True)))
    attention = replace(attention, qkv_bias=fields.flag("attention_bias", default=True))
    layers = [LayerSpec(attention, read_mlp(fields))] * read_num_layers(fields)
    return read_model(fields, ARCHITECTURE, layers, names=_NAMES, default_eps=1.5625e-7)


FAMILY = Family(ARCHITECTURE, "glm", read)
