"""Kimi-Linear: Kimi Delta Attention in most layers, latent attention without positions in the others, and experts."""

from __future__ import annotations

from dataclasses import replace

from baton.kernels.routing import RouterSpec
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.rope_config import NO_ROPE, RopeConfig
from baton.worker.layers.spec import ExpertsSpec, LayerSpec, MlpSpec
from baton.worker.layers.state_spec import KimiDeltaSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import StateNames, TensorNames
from baton.worker.models.reading import Family, read_mlp, read_model, read_num_layers
from baton.worker.models.reading_experts import (
    W_NAMES,
    check_silu,
    read_router,
    read_sparse_kinds,
    with_groups,
)
from baton.worker.models.reading_latent import read_latent_attention

ARCHITECTURE = "KimiLinearForCausalLM"
_KINDS = ("linear_attention", "full_attention")
_DELTA = "linear_attn_config"  # of checkpoints; Transformers writes its values beside the others
_OWN, _SPARSE = "self_attn.", "block_sparse_moe."
_ROPE_KEYS = ("rope_scaling", "rope_parameters")
_NAMES = TensorNames(
    states=StateNames(
        proj=tuple(_OWN + part + "_proj" for part in ("q", "k", "v", "b", "f_a", "g_a")),
        conv=tuple(_OWN + part + "_conv1d" for part in ("q", "k", "v")),
        log_rate=_OWN + "A_log",
        bias=_OWN + "dt_bias",
        norm=_OWN + "o_norm",
        o=_OWN + "o_proj",
        ups=(_OWN + "f_b_proj", _OWN + "g_b_proj"),
    ),
    router=_SPARSE + "gate",
    router_correction=_SPARSE + "gate.e_score_correction_bias",
    experts=W_NAMES,
    shared_gate_up=(_SPARSE + "shared_experts.gate_proj", _SPARSE + "shared_experts.up_proj"),
    shared_down=_SPARSE + "shared_experts.down_proj",
    # Transformers writes dense MLPs so.
    endings=tuple((f"mlp.{part}_proj.weight", f"{_SPARSE}{part}_proj.weight") for part in ("gate", "up", "down")),
)


def read(fields: Fields) -> ModelConfig:
    """Reads layers that differ in attention and MLP."""
    check_silu(fields)
    for key in ("mla_use_nope", "use_grouped_topk"):
        if not fields.flag(key, default=True):
            raise fields.error(key, "true")
    num_layers = read_num_layers(fields)
    latent, delta, experts = _read_latent(fields), _read_delta(fields), _read_experts(fields)
    layers = [
        LayerSpec(latent if full else delta, experts if sparse else read_mlp(fields))
        for full, sparse in zip(_read_kinds(fields, num_layers), read_sparse_kinds(fields, num_layers), strict=True)
    ]
    length = fields.positive_int("model_max_length", default=1048576)
    own = Fields({"max_position_embeddings": length, **fields.raw}, fields.source)
    return read_model(own, ARCHITECTURE, layers, names=_NAMES, default_eps=1e-5)


def _read_latent(fields: Fields) -> LatentSpec:
    bare = {key: value for key, value in fields.raw.items() if key not in _ROPE_KEYS}
    return replace(read_latent_attention(Fields(bare, fields.source)), rope=RopeConfig(NO_ROPE, 0.0))


def _read_delta(fields: Fields) -> KimiDeltaSpec:
    inner = fields.inner(_DELTA)
    found, keys = (
        (fields, ("linear_conv_kernel_dim", "linear_num_heads", "linear_head_dim"))
        if inner is None
        else (inner, ("short_conv_kernel_size", "num_heads", "head_dim"))
    )
    kernel_size = found.positive_int(keys[0], default=4)
    if kernel_size < 2:
        raise found.error(keys[0], "at least 2")
    return KimiDeltaSpec(
        kernel_size=kernel_size,
        conv_bias=False,
        bias=False,
        num_heads=found.positive_int(keys[1], default=32),
        head_dim=found.positive_int(keys[2], default=128),
        norm_eps=fields.positive_float("rms_norm_eps", default=1e-5),
    )


def _read_experts(fields: Fields) -> ExpertsSpec:
    if fields.text("moe_router_activation_func", default="sigmoid") != "sigmoid":
        raise fields.error("moe_router_activation_func", "sigmoid")
    if fields.positive_int("moe_layer_freq", default=1) != 1:
        raise fields.error("moe_layer_freq", "1")
    size = fields.positive_int("moe_intermediate_size")
    shared = fields.positive_int("num_shared_experts", default=1)
    return ExpertsSpec(_read_router(fields), size, router_in_fp32=True, shared=MlpSpec(shared * size))


def _read_router(fields: Fields) -> RouterSpec:
    router = replace(
        read_router(fields, ("num_experts",), "num_experts_per_token"),
        score="sigmoid",
        corrected=True,
        renormalized=fields.flag("moe_renormalize", default=True),
        scale=fields.positive_float("routed_scaling_factor", default=2.446),
    )
    return with_groups(fields, router, "num_expert_group")


def _read_kinds(fields: Fields, num_layers: int) -> list[bool]:
    """Returns True for the layers with latent attention."""
    kinds, inner = fields.raw.get("layer_types"), fields.inner(_DELTA)
    if kinds is None and inner is not None:
        full, delta = inner.raw.get("full_attn_layers"), inner.raw.get("kda_layers")  # from 1
        if not isinstance(full, list) or not isinstance(delta, list):
            raise inner.error("full_attn_layers", "a list of layers, beside one of the others at kda_layers")
        if sorted([*full, *delta]) != list(range(1, num_layers + 1)):
            raise inner.error("full_attn_layers", f"with kda_layers each of the layers 1 to {num_layers} once")
        kinds = [_KINDS[layer in full] for layer in range(1, num_layers + 1)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(_KINDS):
        raise fields.error("layer_types", f"a list of {num_layers} x {' or '.join(_KINDS)}")
    if "full_attention" not in kinds:
        raise fields.error("layer_types", "a list with full_attention: models of states alone are not supported")
    return [kind == "full_attention" for kind in kinds]


FAMILY = Family(ARCHITECTURE, "kimi_linear", read, ignores_auto_map=True, executors=("cpu",))
