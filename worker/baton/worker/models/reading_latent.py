"""What families with multi-head latent attention read from config.json in one way."""

from __future__ import annotations

from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.rope_config import RopeConfig, magnitude_scale
from baton.worker.layers.spec import ExpertsSpec, LayerSpec, MlpSpec
from baton.worker.models.fields import Fields
from baton.worker.models.reading import read_mlp, read_num_layers
from baton.worker.models.reading_rope import RopeDefaults, read_rope


def read_latent_attention(fields: Fields, *, interleaved: bool = True) -> LatentSpec:
    """Reads the sizes, and RoPE of the rotated part of heads, whose pairs are neighbours if `interleaved`."""
    q_rank = fields.positive_int("q_lora_rank") if fields.raw.get("q_lora_rank") is not None else 0
    nope_dim, rope_dim = fields.positive_int("qk_nope_head_dim"), fields.positive_int("qk_rope_head_dim")
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", "an even number")
    # RoPE's factors are of the rotated part of heads.
    rope = read_rope(Fields({**fields.raw, "head_dim": rope_dim}, fields.source), RopeDefaults(interleaved=interleaved))
    bias = fields.flag("attention_bias", default=False)
    if bias and not q_rank:
        raise fields.error("attention_bias", "false where q_lora_rank is null")
    return LatentSpec(
        num_q_heads=fields.positive_int("num_attention_heads"),
        q_rank=q_rank,
        kv_rank=fields.positive_int("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=fields.positive_int("v_head_dim"),
        rope=rope,
        scale=float(nope_dim + rope_dim) ** -0.5 * _long_context_scale(rope),
        bias=bias,
    )


def read_dense_first(fields: Fields, attention: LatentSpec, experts: ExpertsSpec, default: int) -> list[LayerSpec]:
    """Reads how many layers at the start are dense; the others have experts."""
    num_dense = fields.number("first_k_dense_replace", default=default)
    if fields.positive_int("moe_layer_freq", default=1) != 1:
        raise fields.error("moe_layer_freq", "1")
    dense = read_mlp(fields)
    return [LayerSpec(attention, dense if layer < num_dense else experts) for layer in range(read_num_layers(fields))]


def read_shared(fields: Fields, size: int, default: int) -> MlpSpec | None:
    """Reads the experts that all tokens share, each of `size` intermediate values, as one."""
    if fields.raw.get("n_shared_experts", default) in (0, None):
        return None
    return MlpSpec(fields.positive_int("n_shared_experts", default=default) * size)


def _long_context_scale(rope: RopeConfig) -> float:
    """Returns what scores are multiplied with where RoPE is scaled, by YaRN's mscale_all_dim."""
    return magnitude_scale(rope.factor, rope.mscale_all_dim) ** 2 if rope.mscale_all_dim else 1.0
