"""Phi-3 and Phi-4: Llama's layers; checkpoints store q, k, v as one tensor, and gate, up as another."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers, read_windows
from baton.worker.models.reading_rope import RopeDefaults, read_rope

ARCHITECTURE = "Phi3ForCausalLM"
_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))

_ROPE = RopeDefaults(partial=1.0, original_length=4096, spellings={"su": "longrope", "yarn": "longrope"})


def read(fields: Fields) -> ModelConfig:
    """Reads layers without biases."""
    attention, mlp = read_attention(fields, read_rope(fields, _ROPE)), read_mlp(fields)
    windows = read_windows(fields, read_num_layers(fields))
    layers = [LayerSpec(replace(attention, window=window), mlp) for window in windows]
    return read_model(fields, ARCHITECTURE, layers, names=_NAMES, default_eps=1e-5)


FAMILY = Family(ARCHITECTURE, "phi3", read, ignores_auto_map=True)
