"""OLMo 2: norms apply to the outputs of attention and MLP, not to their inputs; QK norms span all heads."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers

ARCHITECTURE = "Olmo2ForCausalLM"
_NAMES = TensorNames(attention_output_norm="post_attention_layernorm", mlp_output_norm="post_feedforward_layernorm")


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike."""
    bias = fields.flag("attention_bias", default=False)
    attention = replace(read_attention(fields), qkv_bias=bias, o_bias=bias, qk_norm="projection")
    layer = LayerSpec(attention, read_mlp(fields), input_norms=False, output_norms=True)
    return read_model(fields, ARCHITECTURE, [layer] * read_num_layers(fields), names=_NAMES, default_eps=1e-5)


FAMILY = Family(ARCHITECTURE, "olmo2", read)
