"""Nemotron-H and Nemotron 3: Mamba-2, attention without positions, squared-ReLU MLPs and experts, each a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.kernels.routing import Gate
from baton.worker.layers.rope_config import NO_ROPE, RopeConfig
from baton.worker.layers.spec import NO_MLP, AttentionSpec, ExpertsSpec, LayerSpec, MlpSpec, NormSpec
from baton.worker.layers.state_spec import StateSpaceSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import StateNames, TensorNames
from baton.worker.models.reading import Family, read_activation, read_attention, read_model
from baton.worker.models.reading_experts import read_grouped_router
from baton.worker.models.reading_states import read_step_limits
from baton.worker.quantization.expert_names import ExpertNames

ARCHITECTURE = "NemotronHForCausalLM"
_OF_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_PRESENT = {"linear_attention": "mamba", "full_attention": "attention"}
_NAMES = TensorNames(
    embed="model.embeddings",
    norm="model.norm_f",
    attention_input_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o="mixer.o_proj",
    mlp_input_norm="norm",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    router="mixer.gate",
    router_correction="mixer.gate.e_score_correction_bias",
    experts=ExpertNames(
        gate_up=("mixer.experts.{}.up_proj.weight",),
        down="mixer.experts.{}.down_proj.weight",
        other=ExpertNames(gate_up=("mixer.experts.up_proj",), down="mixer.experts.down_proj"),
    ),
    shared_gate_up=("mixer.shared_experts.up_proj",),
    shared_down="mixer.shared_experts.down_proj",
    states=StateNames(
        proj=("mixer.in_proj",),
        conv=("mixer.conv1d",),
        log_rate="mixer.A_log",
        bias="mixer.dt_bias",
        skip="mixer.D",
        norm="mixer.norm",
        o="mixer.out_proj",
    ),
    aliases=(("model.", "backbone."),),
)


def read(fields: Fields) -> ModelConfig:
    """Reads layers of one part each. An MLP, or experts, and the mixer before are one layer of ours."""
    blocks = _read_blocks(fields)
    attention, mamba = _read_attention(fields), _read_mamba(fields)
    mlps: dict[str, MlpSpec | ExpertsSpec] = {}
    if "mlp" in blocks:
        mlps["mlp"] = _read_mlp(fields, "intermediate_size")
    if "moe" in blocks:
        mlps["moe"] = _read_experts(fields)
    layers: list[LayerSpec] = []
    places: list[tuple[int, int]] = []
    for place, block in enumerate(blocks):
        if block in mlps:
            layers[-1], places[-1] = replace(layers[-1], mlp=mlps[block]), (places[-1][0], place)
        else:
            layers.append(LayerSpec(mamba if block == "mamba" else attention, NO_MLP))
            places.append((place, place))
    norm = NormSpec(fields.positive_float("layer_norm_epsilon", default=1e-5))
    return read_model(fields, ARCHITECTURE, layers, names=replace(_NAMES, places=tuple(places)), norm=norm)


def _read_blocks(fields: Fields) -> Sequence[str]:
    """Reads the kinds of the checkpoint's layers: a list, or a pattern of one letter each."""
    key = "layers_block_type" if fields.raw.get("layers_block_type") is not None else "hybrid_override_pattern"
    given = fields.raw.get(key)
    if not isinstance(given, list | str) or not given:
        raise fields.error(key, "a list of layers_block_type, or a pattern of M, *, - and E")
    named = [_OF_PATTERN.get(one, one) for one in given] if isinstance(given, str) else given
    blocks = [_PRESENT.get(one, one) for one in named]
    if set(blocks) - {"mamba", "attention", "mlp", "moe"}:
        raise fields.error(key, "a list of mamba, attention, mlp and moe, or their letters M, *, - and E")
    if "attention" not in blocks:
        raise fields.error(key, "a list with attention: models of states alone are not supported")
    mixers = {"mamba", "attention"}
    if any(not {before, block} & mixers for before, block in zip(["", *blocks], blocks, strict=False)):
        raise fields.error(key, "a list whose MLPs and experts follow mamba or attention")
    return blocks


def _read_mlp(fields: Fields, size_key: str) -> MlpSpec:
    return MlpSpec(
        fields.positive_int(size_key),
        bias=fields.flag("mlp_bias", default=False),
        activation=read_activation(fields, "mlp_hidden_act", default="relu2"),
        gated=False,
    )


def _read_experts(fields: Fields) -> ExpertsSpec:
    """Reads experts without gates, and the one that all tokens share. Raises InvalidRequest for other activations."""
    shared = _read_mlp(fields, "moe_shared_expert_intermediate_size")
    if shared.activation != "relu2":
        raise fields.error("mlp_hidden_act", "relu2 where there are experts")
    if fields.raw.get("moe_latent_size") is not None:
        raise fields.error("moe_latent_size", "null: experts between projections of their own are not supported")
    if fields.positive_int("n_shared_experts", default=1) != 1:
        raise fields.error("n_shared_experts", "1")
    return ExpertsSpec(
        read_grouped_router(fields, ("n_routed_experts",)),
        fields.positive_int("moe_intermediate_size"),
        gate=Gate(squares=True),
        router_in_fp32=True,
        shared=shared,
    )


def _read_attention(fields: Fields) -> AttentionSpec:
    if fields.flag("attention_bias", default=False):
        raise fields.error("attention_bias", "false")
    return read_attention(fields, RopeConfig(NO_ROPE, 0.0))


def _read_mamba(fields: Fields) -> StateSpaceSpec:
    num_heads = fields.positive_int("mamba_num_heads", default=128)
    num_groups = fields.positive_int("n_groups", default=8)
    if num_heads % num_groups:
        raise fields.error("mamba_num_heads", f"a multiple of n_groups ({num_groups})")
    if fields.text("mamba_hidden_act", default="silu") != "silu":
        raise fields.error("mamba_hidden_act", "silu")
    return StateSpaceSpec(
        kernel_size=fields.positive_int("conv_kernel", default=4),
        conv_bias=fields.flag("use_conv_bias", default=True),
        bias=fields.flag("use_bias", default=False),
        num_heads=num_heads,
        head_dim=fields.positive_int("mamba_head_dim", default=64),
        num_groups=num_groups,
        state_size=fields.positive_int("ssm_state_size", default=128),
        norm_eps=fields.positive_float("layer_norm_epsilon", default=1e-5),
        # Transformers 5.24 limits the steps of prompts by time_step_min instead, and those of decodes by nothing.
        step_limits=read_step_limits(fields),
    )


FAMILY = Family(ARCHITECTURE, "nemotron_h", read, ignores_auto_map=True)
