"""Nemotron-H without experts: Mamba-2, attention without positions and squared-ReLU MLPs, each a layer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.worker.layers.rope_config import NO_ROPE, RopeConfig
from baton.worker.layers.spec import NO_MLP, AttentionSpec, LayerSpec, MlpSpec, NormSpec
from baton.worker.layers.state_spec import StateSpaceSpec
from baton.worker.models.config import ModelConfig
from baton.worker.models.fields import Fields
from baton.worker.models.names import StateNames, TensorNames
from baton.worker.models.reading import Family, read_activation, read_attention, read_model
from baton.worker.models.reading_states import read_step_limits

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
    states=StateNames(
        proj=("mixer.in_proj",),
        conv="mixer.conv1d",
        log_rate="mixer.A_log",
        bias="mixer.dt_bias",
        skip="mixer.D",
        norm="mixer.norm",
        o="mixer.out_proj",
    ),
    aliases=(("model.", "backbone."),),
)


def read(fields: Fields) -> ModelConfig:
    """Reads layers of one part each. An MLP and the mixer before it are one layer of ours."""
    blocks = _read_blocks(fields)
    attention, mamba = _read_attention(fields), _read_mamba(fields)
    mlp = MlpSpec(
        fields.positive_int("intermediate_size"),
        bias=fields.flag("mlp_bias", default=False),
        activation=read_activation(fields, "mlp_hidden_act", default="relu2"),
        gated=False,
    )
    layers: list[LayerSpec] = []
    places: list[tuple[int, int]] = []
    for place, block in enumerate(blocks):
        if block == "mlp":
            layers[-1], places[-1] = replace(layers[-1], mlp=mlp), (places[-1][0], place)
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
        raise fields.error(key, "a list of layers_block_type, or a pattern of M, * and -")
    named = [_OF_PATTERN.get(one, one) for one in given] if isinstance(given, str) else given
    blocks = [_PRESENT.get(one, one) for one in named]
    if "moe" in blocks:
        raise fields.error(key, "layers without experts, which have no gates here: they are not supported")
    if set(blocks) - {"mamba", "attention", "mlp"}:
        raise fields.error(key, "a list of mamba, attention and mlp, or their letters M, * and -")
    if "attention" not in blocks:
        raise fields.error(key, "a list with attention: models of states alone are not supported")
    if any(block == "mlp" and before in ("", "mlp") for before, block in zip(["", *blocks], blocks, strict=False)):
        raise fields.error(key, "a list whose MLPs follow mamba or attention")
    return blocks


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


FAMILY = Family(ARCHITECTURE, "nemotron_h", read, ignores_auto_map=True, executors=("cpu",))
