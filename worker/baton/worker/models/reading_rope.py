"""Reads a model's RoPE from the old and the new keys of config.json."""

from __future__ import annotations

from baton.worker.layers.rope_config import KINDS, RopeConfig
from baton.worker.models.fields import Fields


def read_rope(fields: Fields, max_position_embeddings: int) -> RopeConfig:
    """Reads rope_parameters, or rope_theta and rope_scaling."""
    scaling = fields.inner("rope_parameters") or fields.inner("rope_scaling")
    theta = fields.positive_float("rope_theta", default=10000.0)
    if scaling is None:
        return RopeConfig("default", theta)
    theta = scaling.positive_float("rope_theta", default=theta)
    kind_key = "rope_type" if "rope_type" in scaling.raw else "type"
    kind = scaling.text(kind_key, default="default")
    if kind not in KINDS:
        raise scaling.error(kind_key, f"one of {', '.join(KINDS)}")
    if scaling.number("partial_rotary_factor", default=1.0) != 1.0:
        raise scaling.error("partial_rotary_factor", "1")
    if kind == "default":
        return RopeConfig(kind, theta)
    factor = scaling.positive_float("factor")
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    if kind == "llama3":
        return _llama3(scaling, theta, factor)
    return _yarn(scaling, theta, factor, max_position_embeddings)


def _llama3(scaling: Fields, theta: float, factor: float) -> RopeConfig:
    low = scaling.positive_float("low_freq_factor")
    high = scaling.positive_float("high_freq_factor")
    if high <= low:
        raise scaling.error("high_freq_factor", f"above low_freq_factor ({low:g})")
    original = scaling.positive_int("original_max_position_embeddings")
    return RopeConfig("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)


def _yarn(scaling: Fields, theta: float, factor: float, max_position_embeddings: int) -> RopeConfig:
    has_factor = scaling.raw.get("attention_factor") is not None
    return RopeConfig(
        "yarn",
        theta,
        factor,
        scaling.positive_int("original_max_position_embeddings", default=max_position_embeddings),
        beta_fast=scaling.positive_float("beta_fast", default=32.0),
        beta_slow=scaling.positive_float("beta_slow", default=1.0),
        truncate=scaling.flag("truncate", default=True),
        attention_factor=scaling.positive_float("attention_factor") if has_factor else None,
        mscale=scaling.number("mscale", default=0.0),
        mscale_all_dim=scaling.number("mscale_all_dim", default=0.0),
    )
