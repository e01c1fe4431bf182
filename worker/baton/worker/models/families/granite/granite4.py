"""Granite 4: Granite 3's layers under other names, with or without RoPE, some of them Mamba-2, some with experts."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.rope_config import NO_ROPE, RopeConfig
from baton.worker.layers.spec import ExpertsSpec, MlpSpec
from baton.worker.layers.state_spec import StateSpaceSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.families.granite import granite
from baton.worker.models.families.moe.granite import EXPERTS, ROUTER, read_chosen_router
from baton.worker.models.fields import Fields
from baton.worker.models.names import StateNames, TensorNames
from baton.worker.models.reading import Family, read_num_layers
from baton.worker.models.reading_states import read_step_limits

ARCHITECTURE = "GraniteMoeHybridForCausalLM"
_STATES = StateNames(
    proj=("mamba.in_proj",),
    conv=("mamba.conv1d",),
    log_rate="mamba.A_log",
    bias="mamba.dt_bias",
    skip="mamba.D",
    norm="mamba.norm",
    o="mamba.out_proj",
)
_INPUT, _OUTPUT = ("shared_mlp.input_linear",), "shared_mlp.output_linear"
_NAMES = TensorNames(
    gate_up=_INPUT,
    down=_OUTPUT,
    router=ROUTER,
    experts=EXPERTS,
    shared_gate_up=_INPUT,
    shared_down=_OUTPUT,
    states=_STATES,
)
_ATTENTION, _MAMBA = {"attention", "full_attention"}, {"mamba", "linear_attention"}


def read(fields: Fields) -> ModelConfig:
    """Reads layers of attention or Mamba-2. Raises InvalidRequest for models without attention.

    Where there are experts, all layers have them, and the MLP of the others is their shared expert.
    """
    num_layers, kinds = read_num_layers(fields), fields.raw.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - _ATTENTION - _MAMBA:
        raise fields.error("layer_types", f"a list of {num_layers} x attention or mamba")
    if not _ATTENTION & set(kinds):
        raise fields.error("layer_types", "a list with attention: models of states alone are not supported")
    position = fields.text("position_embedding_type", default="nope")
    if position not in ("rope", "nope"):
        raise fields.error("position_embedding_type", "rope or nope")
    width = fields.positive_int("shared_intermediate_size", default=1024)
    config = granite.read(Fields({**fields.raw, "intermediate_size": width, "mlp_bias": None}, fields.source))
    layer = config.layers[0]
    if fields.raw.get("num_local_experts") != 0:
        defaults = {"num_local_experts": 8, "num_experts_per_tok": 2}
        router = read_chosen_router(Fields({**defaults, **fields.raw}, fields.source))
        experts = ExpertsSpec(router, fields.positive_int("intermediate_size", default=4096))
        assert isinstance(layer.mlp, MlpSpec)
        layer = replace(layer, mlp=replace(experts, shared=layer.mlp))
    if position == "nope":
        layer = replace(layer, attention=replace(layer.grouped, rope=RopeConfig(NO_ROPE, 0.0)))
    mamba = replace(layer, attention=_read_mamba(fields)) if _MAMBA & set(kinds) else layer
    layers = tuple(layer if kind in _ATTENTION else mamba for kind in kinds)
    return replace(config, architecture=ARCHITECTURE, names=_NAMES, layers=layers)


def _read_mamba(fields: Fields) -> StateSpaceSpec:
    num_heads = fields.positive_int("mamba_n_heads", default=128)
    num_groups = fields.positive_int("mamba_n_groups", default=1)
    width = fields.positive_int("mamba_expand", default=2) * fields.positive_int("hidden_size")
    if width % num_heads or num_heads % num_groups:
        raise fields.error("mamba_n_heads", f"a divisor of {width}, and a multiple of mamba_n_groups ({num_groups})")
    if fields.raw.get("mamba_d_head", "auto") not in ("auto", width // num_heads):
        raise fields.error("mamba_d_head", f"auto or {width // num_heads}")
    if fields.text("hidden_act", default="silu") != "silu":
        raise fields.error("hidden_act", "silu")
    return StateSpaceSpec(
        kernel_size=fields.positive_int("mamba_d_conv", default=4),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        bias=fields.flag("mamba_proj_bias", default=False),
        num_heads=num_heads,
        head_dim=width // num_heads,
        num_groups=num_groups,
        state_size=fields.positive_int("mamba_d_state", default=256),
        norm_eps=fields.positive_float("rms_norm_eps", default=1e-6),
        step_limits=read_step_limits(fields),
    )


FAMILY = Family(ARCHITECTURE, "granitemoehybrid", read)
