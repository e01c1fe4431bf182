"""What Qwen3-Next and Qwen3.5 share: Gated DeltaNet, gated attention, and which layers have which."""

from __future__ import annotations

from dataclasses import replace

from baton.worker.layers.spec import AttentionSpec
from baton.worker.layers.state_spec import DeltaNetSpec
from baton.worker.models.fields import Fields
from baton.worker.models.reading import read_attention
from baton.worker.models.reading_rope import RopeDefaults, read_rope

_KINDS = ("linear_attention", "full_attention")


def read_delta_net(fields: Fields, *, by_key_head: bool) -> DeltaNetSpec:
    """Reads the layers of linear attention."""
    num_heads = fields.positive_int("linear_num_value_heads", default=32)
    num_key_heads = fields.positive_int("linear_num_key_heads", default=16)
    if num_heads % num_key_heads:
        raise fields.error("linear_num_key_heads", f"a divisor of linear_num_value_heads ({num_heads})")
    if fields.text("hidden_act", default="silu") != "silu":
        raise fields.error("hidden_act", "silu")
    return DeltaNetSpec(
        kernel_size=fields.positive_int("linear_conv_kernel_dim", default=4),
        conv_bias=False,
        bias=False,
        num_key_heads=num_key_heads,
        num_heads=num_heads,
        key_dim=fields.positive_int("linear_key_head_dim", default=128),
        value_dim=fields.positive_int("linear_value_head_dim", default=128),
        norm_eps=fields.positive_float("rms_norm_eps", default=1e-6),
        by_key_head=by_key_head,
    )


def read_gated_attention(fields: Fields) -> AttentionSpec:
    """Reads the layers of full attention."""
    bias = fields.flag("attention_bias", default=False)
    attention = read_attention(fields, read_rope(fields, RopeDefaults(partial=0.25)))
    return replace(attention, qkv_bias=bias, o_bias=bias, qk_norm="head", output_gate=True)


def read_kinds(fields: Fields, num_layers: int) -> list[bool]:
    """Returns True for the layers with full attention."""
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        interval = fields.positive_int("full_attention_interval", default=4)
        kinds = [_KINDS[(layer + 1) % interval == 0] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(_KINDS):
        raise fields.error("layer_types", f"a list of {num_layers} x {' or '.join(_KINDS)}")
    if "full_attention" not in kinds:
        raise fields.error("layer_types", "a list with full_attention: models of states alone are not supported")
    return [kind == "full_attention" for kind in kinds]
