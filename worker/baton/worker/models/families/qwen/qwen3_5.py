"""Qwen3.5, text: Gated DeltaNet in most layers, gated attention in the others, and one MLP."""

from __future__ import annotations

from baton.worker.layers.spec import LayerSpec, NormSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.families.qwen.delta_net import read_delta_net, read_gated_attention, read_kinds
from baton.worker.models.fields import Fields
from baton.worker.models.names import StateNames, TensorNames
from baton.worker.models.reading import Family, read_mlp, read_model, read_num_layers

ARCHITECTURE = "Qwen3_5ForCausalLM"
_OWN = "linear_attn.in_proj_"
_NAMES = TensorNames(states=StateNames(proj=(_OWN + "qkv", _OWN + "z", _OWN + "b", _OWN + "a")))


def read(fields: Fields) -> ModelConfig:
    """Reads layers that differ in attention. All positions of a text are alike in the three parts of its RoPE."""
    num_layers = read_num_layers(fields)
    attention, delta_net = read_gated_attention(fields), read_delta_net(fields, by_key_head=False)
    mlp = read_mlp(fields)
    layers = [LayerSpec(attention if full else delta_net, mlp) for full in read_kinds(fields, num_layers)]
    norm = NormSpec(fields.positive_float("rms_norm_eps", default=1e-6), offset=1.0)
    return read_model(fields, ARCHITECTURE, layers, names=_NAMES, norm=norm)


FAMILY = Family(ARCHITECTURE, "qwen3_5_text", read)
