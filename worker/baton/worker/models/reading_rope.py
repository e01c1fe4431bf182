"""Reads a model's RoPE from the old and the new keys of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.worker.layers.rope_config import KINDS, RopeConfig
from baton.worker.models.fields import Fields
from baton.worker.models.reading_sizes import read_head_dim, read_max_position_embeddings


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """A family's RoPE, where its config has no value."""

    theta: float = 10000.0
    partial: float | None = None  # rotated fraction of each head; None: configs may not set one
    interleaved: bool = False
    original_length: int = 0  # of longrope; 0: max_position_embeddings
    spellings: Mapping[str, str] = field(default_factory=dict)  # of kinds, in older configs
    scales_queries: bool = False  # configs may have llama_4_scaling_beta


_PLAIN = RopeDefaults()


def read_rope(fields: Fields, defaults: RopeDefaults = _PLAIN) -> RopeConfig:
    """Reads rope_parameters, or rope_theta and rope_scaling."""
    return _read_set(fields, _scaling(fields), fields, defaults)


def read_ropes(fields: Fields, full: RopeDefaults, sliding: RopeDefaults) -> tuple[RopeConfig, RopeConfig]:
    """Returns the RoPE of layers with full attention and of layers with windows. rope_parameters has one for each; the
    older rope_scaling applies to full attention only."""
    scaling, nothing = _scaling(fields), Fields({}, fields.source)
    if scaling is None or not any(isinstance(value, dict) for value in scaling.raw.values()):
        return _read_set(fields, scaling, fields, full), _read_set(nothing, None, fields, sliding)
    return (
        _read_set(nothing, scaling.inner("full_attention"), fields, full),
        _read_set(nothing, scaling.inner("sliding_attention"), fields, sliding),
    )


def _scaling(fields: Fields) -> Fields | None:
    return fields.inner("rope_parameters") or fields.inner("rope_scaling")


def _read_set(outside: Fields, scaling: Fields | None, model: Fields, defaults: RopeDefaults) -> RopeConfig:
    """Reads one set of parameters. Older configs keep some of them in `outside`."""
    scaling = scaling or Fields({}, outside.source)
    if nested := [key for key, value in scaling.raw.items() if isinstance(value, dict)]:
        raise scaling.error(nested[0], "absent: all layers of this architecture share one set of parameters")
    theta = scaling.positive_float("rope_theta", default=outside.positive_float("rope_theta", default=defaults.theta))
    rotary_dim = _rotary_dim(scaling, outside, read_head_dim(model), defaults)
    kind_key = "rope_type" if "rope_type" in scaling.raw else "type"
    kind = scaling.text(kind_key, default="default")
    kind = defaults.spellings.get(kind, kind)
    if kind not in KINDS:
        raise scaling.error(kind_key, f"one of {', '.join(KINDS)}")
    if kind == "longrope":
        rope = _longrope(scaling, theta, model, rotary_dim or read_head_dim(model), defaults)
    else:
        rope = _read_scaled(scaling, kind, theta, read_max_position_embeddings(model))
    rope = replace(rope, rotary_dim=rotary_dim, interleaved=defaults.interleaved)
    beta = scaling.number("llama_4_scaling_beta", default=0.0) if defaults.scales_queries else 0.0
    return replace(rope, query_beta=beta) if beta and rope.original_length else rope


def _rotary_dim(scaling: Fields, outside: Fields, head_dim: int, defaults: RopeDefaults) -> int:
    """Returns RopeConfig.rotary_dim."""
    key = "partial_rotary_factor"
    where = outside if scaling.raw.get(key) is None else scaling
    if defaults.partial is None:
        if scaling.number(key, default=1.0) != 1.0:
            raise scaling.error(key, "1")
        return 0
    width = int(head_dim * where.positive_float(key, default=defaults.partial))
    if not 0 < width <= head_dim or width % 2:
        raise where.error(key, f"such that an even number of head_dim ({head_dim}) dimensions rotates")
    return width if width < head_dim else 0


def _read_scaled(scaling: Fields, kind: str, theta: float, max_position_embeddings: int) -> RopeConfig:
    if kind == "default":
        return RopeConfig(kind, theta)
    factor = scaling.positive_float("factor")
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    if kind == "dynamic":
        return RopeConfig(kind, theta, factor, max_position_embeddings)
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


def _longrope(scaling: Fields, theta: float, model: Fields, width: int, defaults: RopeDefaults) -> RopeConfig:
    longest = read_max_position_embeddings(model)
    key = "original_max_position_embeddings"
    original = scaling.positive_int(key, default=defaults.original_length or longest)
    original = model.positive_int(key, default=original)
    has_factor = scaling.raw.get("attention_factor") is not None
    return RopeConfig(
        "longrope",
        theta,
        scaling.positive_float("factor", default=longest / original),
        original,
        attention_factor=scaling.positive_float("attention_factor") if has_factor else None,
        factors=_factors(scaling, "short_factor", width // 2),
        long_factors=_factors(scaling, "long_factor", width // 2),
    )


def _factors(scaling: Fields, key: str, count: int) -> tuple[float, ...]:
    values = scaling.raw.get(key)
    if not isinstance(values, list) or len(values) != count or not all(_is_positive(value) for value in values):
        raise scaling.error(key, f"a list of {count} numbers above 0")
    return tuple(float(value) for value in values)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


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
