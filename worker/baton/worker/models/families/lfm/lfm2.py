"""LFM2: short convolutions between gates in most layers, attention in the others."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import LayerSpec, MlpSpec, NormSpec
from baton.worker.layers.state_spec import ShortConvSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import StateNames, TensorNames
from baton.worker.models.reading import Family, read_attention, read_model, read_num_layers
from baton.worker.models.reading_rope import RopeDefaults, read_rope

ARCHITECTURE = "Lfm2ForCausalLM"
_KINDS = ("conv", "full_attention")
_NAMES = TensorNames(
    norm="model.embedding_norm",
    attention_input_norm="operator_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    o="self_attn.out_proj",
    mlp_input_norm="ffn_norm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    states=StateNames(proj=("conv.in_proj",), conv=("conv.conv",), o="conv.out_proj"),
)


def read(fields: Fields) -> ModelConfig:
    """Reads layers that differ in attention."""
    num_layers, hidden_size = read_num_layers(fields), fields.positive_int("hidden_size")
    bias = fields.flag("conv_bias", default=False)
    kernel_size = fields.positive_int("conv_L_cache", default=3)
    if kernel_size < 2:
        raise fields.error("conv_L_cache", "at least 2")
    conv = ShortConvSpec(kernel_size, bias, bias, hidden_size)
    attention = replace(read_attention(fields, read_rope(fields, RopeDefaults(theta=1e6))), qk_norm="head")
    mlp = MlpSpec(_intermediate_size(fields))
    layers = [LayerSpec(attention if full else conv, mlp) for full in _read_kinds(fields, num_layers)]
    norm = NormSpec(fields.positive_float("norm_eps", default=1e-5))
    tied = fields.flag("tie_embedding", default=True)
    return read_model(fields, ARCHITECTURE, layers, names=_NAMES, norm=norm, default_tied=tied)


def _intermediate_size(fields: Fields) -> int:
    """Reads the width of MLPs, which configs state before it is reduced and rounded."""
    size = fields.positive_int("block_ff_dim", default=fields.positive_int("intermediate_size", default=12288))
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return size
    size = int(2 * size / 3)
    if fields.raw.get("block_ffn_dim_multiplier", 1.0) is None:
        return size
    size = int(fields.positive_float("block_ffn_dim_multiplier", default=1.0) * size)
    step = fields.positive_int("block_multiple_of", default=256)
    return -(-size // step) * step


def _read_kinds(fields: Fields, num_layers: int) -> list[bool]:
    """Returns True for the layers with attention."""
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        full = fields.raw.get("full_attn_idxs")
        indices = range(num_layers) if full is None else full
        kinds = [_KINDS[layer in indices] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(_KINDS):
        raise fields.error("layer_types", f"a list of {num_layers} x {' or '.join(_KINDS)}")
    if "full_attention" not in kinds:
        raise fields.error("layer_types", "a list with full_attention: models of states alone are not supported")
    return [kind == "full_attention" for kind in kinds]


FAMILY = Family(ARCHITECTURE, "lfm2", read)
