"""StarCoder2: LayerNorm and biases throughout, an MLP without gates, and a window."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec, MlpSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import (
    Family,
    read_activation,
    read_attention,
    read_model,
    read_num_layers,
    read_windows,
)

ARCHITECTURE = "Starcoder2ForCausalLM"
_NAMES = TensorNames(gate_up=("mlp.c_fc",), down="mlp.c_proj")


def read(fields: Fields) -> ModelConfig:
    """Reads a config whose layers are all alike."""
    bias = fields.flag("use_bias", default=True)
    attention = replace(read_attention(fields), qkv_bias=bias, o_bias=bias)
    activation = read_activation(fields, default="gelu_pytorch_tanh")
    mlp = MlpSpec(fields.positive_int("intermediate_size"), bias, activation, gated=False)
    windows = read_windows(fields, read_num_layers(fields))
    return read_model(
        fields,
        ARCHITECTURE,
        [LayerSpec(replace(attention, window=window), mlp) for window in windows],
        names=_NAMES,
        norm=NormSpec(fields.positive_float("norm_epsilon", default=1e-5), centered=True, bias=True),
        default_tied=True,
    )


FAMILY = Family(ARCHITECTURE, "starcoder2", read)
