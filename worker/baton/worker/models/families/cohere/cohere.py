"""Cohere's Command R: attention and MLP read the same residual; LayerNorm without biases, RoPE of neighbours."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers
from baton.worker.models.reading_rope import RopeDefaults, read_rope

ARCHITECTURE = "CohereForCausalLM"
_NAMES = TensorNames(mlp_input_norm="input_layernorm")
_ROPE = RopeDefaults(theta=5e5, interleaved=True)


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike."""
    normed = fields.flag("use_qk_norm", default=False)
    layer = read_layer(fields)
    layer = replace(layer, attention=replace(layer.grouped, qk_norm="each_head" if normed else "none"))
    return read_around(fields, ARCHITECTURE, [layer] * read_num_layers(fields))


def read_layer(fields: Fields) -> LayerSpec:
    """Reads a layer with RoPE and without a window."""
    bias = fields.flag("attention_bias", default=False)
    attention = replace(read_attention(fields, read_rope(fields, _ROPE)), qkv_bias=bias, o_bias=bias)
    return LayerSpec(attention, read_mlp(fields), parallel=True)


def read_around(fields: Fields, architecture: str, layers: list[LayerSpec]) -> ModelConfig:
    """Reads the rest of the config around the layers."""
    return read_model(
        fields,
        architecture,
        layers,
        names=_NAMES,
        norm=NormSpec(fields.positive_float("layer_norm_eps", default=1e-5), centered=True),
        logits_divisor=1 / fields.positive_float("logit_scale", default=0.0625),
        default_tied=True,
    )


FAMILY = Family(ARCHITECTURE, "cohere", read)
