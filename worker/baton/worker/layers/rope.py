"""RoPE's tables of cosines and sines, with the scalings that extend a model's context."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from baton.worker.layers.rope_config import NO_ROPE, RopeConfig, magnitude_scale


def cos_sin_tables(ropes: Iterable[RopeConfig], head_dim: int, num_positions: int) -> dict[RopeConfig, Tensor]:
    """Returns the table of each RoPE."""
    return {rope: cos_sin_table(rope, head_dim, num_positions) for rope in ropes}


def cos_sin_table(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """Returns [num_positions, head_dim] fp32: head_dim / 2 cosines, then as many sines, unrotated pairs last."""
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * inverse_frequencies(rope, head_dim)
    factor, still = attention_factor(rope), (0, head_dim // 2 - angles.shape[1])
    cos, sin = functional.pad(angles.cos() * factor, still, value=1.0), functional.pad(angles.sin() * factor, still)
    return torch.cat((cos, sin), dim=1)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Returns radians per position, [rotated pairs] fp32."""
    if rope.kind == NO_ROPE:
        return torch.empty(0)
    assert rope.kind != "dynamic", "RopeConfig.at_length resolves it"
    assert not rope.long_factors, "RopeConfig.at_length chooses one of two"
    head_dim = rope.rotary_dim or head_dim
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    if rope.kind == "longrope":
        return plain / torch.tensor(rope.factors)
    return plain


def query_scales(rope: RopeConfig, num_positions: int) -> Tensor | None:
    """Returns the factor [num_positions] fp32 of queries at each position; None if all are 1."""
    if not rope.query_beta:
        return None
    periods = torch.arange(num_positions) // rope.original_length
    return 1 + rope.query_beta * torch.log1p(periods.float())


def attention_factor(rope: RopeConfig) -> float:
    """Returns the factor that scales cosines and sines; scores are scaled by its square."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_length))
    if rope.mscale and rope.mscale_all_dim:
        return magnitude_scale(rope.factor, rope.mscale) / magnitude_scale(rope.factor, rope.mscale_all_dim)
    return magnitude_scale(rope.factor, 1.0)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Divides the frequencies of long wavelengths by the factor, keeps short ones, interpolates between."""
    wavelength = 2 * math.pi / plain
    longest_kept = rope.original_length / rope.high_freq_factor
    shortest_stretched = rope.original_length / rope.low_freq_factor
    smooth = (rope.original_length / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelength > shortest_stretched, plain / rope.factor, between)
    return torch.where(wavelength < longest_kept, plain, scaled)


def _yarn(rope: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """Keeps dimensions that rotate often within the original length, divides the frequencies of the others."""
    low, high = (
        head_dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * stretched + plain * (1 - stretched)
