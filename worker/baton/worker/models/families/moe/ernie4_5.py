"""ERNIE 4.5 with experts: some layers are dense; RoPE turns pairs of neighbours."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import ExpertsSpec, LayerSpec, MlpSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import TensorNames
from baton.worker.models.reading import Family, read_attention, read_mlp, read_model, read_num_layers
from baton.worker.models.reading_experts import read_router
from baton.worker.models.reading_rope import RopeDefaults, read_rope

ARCHITECTURE = "Ernie4_5_MoeForCausalLM"
_NAMES = TensorNames(router_correction="mlp.moe_statics.e_score_correction_bias", correction_is_row=True)


def read(fields: Fields) -> ModelConfig:
    """Reads layers that differ in their MLPs."""
    bias, num_layers = fields.flag("use_bias", default=False), read_num_layers(fields)
    attention = read_attention(fields, read_rope(fields, RopeDefaults(theta=5e5, interleaved=True)))
    attention = replace(attention, qkv_bias=bias, o_bias=bias)
    dense, experts = replace(read_mlp(fields), bias=bias), _read_experts(fields, bias)
    sparse = _read_sparse_layers(fields, num_layers)
    layers = [LayerSpec(attention, experts if layer in sparse else dense) for layer in range(num_layers)]
    config = read_model(fields, ARCHITECTURE, layers, names=_NAMES, default_eps=1e-5, default_tied=True)
    return replace(config, lm_head_bias=bias)


def _read_experts(fields: Fields, bias: bool) -> ExpertsSpec:
    router = replace(
        read_router(fields, ("moe_num_experts",), "moe_k"),
        corrected=True,
        renormalized=True,
        smallest_sum=fields.positive_float("moe_norm_min", default=1e-12),
    )
    size, num_shared = fields.positive_int("moe_intermediate_size"), fields.raw.get("moe_num_shared_experts", 2)
    shared = MlpSpec(size * fields.positive_int("moe_num_shared_experts", 2), bias) if num_shared else None
    return ExpertsSpec(router, size, router_in_fp32=True, shared=shared)


def _read_sparse_layers(fields: Fields, num_layers: int) -> list[int]:
    """Reads which layers have experts: every moe_layer_interval-th one from the first to the last of them."""
    first, last = fields.number("moe_layer_start_index", 1), fields.number("moe_layer_end_index", -1)
    interval = fields.positive_int("moe_layer_interval", default=1)
    last = num_layers - 1 if last == -1 else last
    return [layer for layer in range(num_layers) if first <= layer <= last and (layer + 1) % interval == 0]


FAMILY = Family(ARCHITECTURE, "ernie4_5_moe", read, ignores_auto_map=True)
