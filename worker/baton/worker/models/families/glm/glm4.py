"""GLM-4-0414: attention and MLP norm inputs and outputs; RoPE turns pairs of neighbours in a part of each head."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers
from baton.worker.models.reading_rope import RopeDefaults, read_rope

ARCHITECTURE = "Glm4ForCausalLM"
_NAMES = TensorNames(
    attention_output_norm="post_self_attn_layernorm",
    mlp_output_norm="post_mlp_layernorm",
    gate_up=("mlp.gate_up_proj",),
)


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike."""
    attention = read_attention(fields, read_rope(fields, RopeDefaults(partial=0.5, interleaved=True)))
    attention = replace(attention, qkv_bias=fields.flag("attention_bias", default=True))
    layer = LayerSpec(attention, read_mlp(fields), output_norms=True)
    return read_model(fields, ARCHITECTURE, [layer] * read_num_layers(fields), names=_NAMES, default_eps=1.5625e-7)


FAMILY = Family(ARCHITECTURE, "glm4", read)
