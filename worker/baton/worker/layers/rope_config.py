"""The description of a model's rotary position embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
NO_ROPE = "none"  # no rotation; not a kind of config.json


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Fields that the kind does not use keep their defaults."""

    kind: str
    theta: float
    factor: float = 1.0
    original_length: int = 0  # tokens that the unscaled model was trained for
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None  # None: computed from the factor
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    rotary_dim: int = 0  # rotated dimensions, at the start of each head; 0: all
    interleaved: bool = False  # pairs are neighbours, not halves of the rotated dimensions
    factors: tuple[float, ...] = ()  # longrope: of the rotated pairs, up to original_length
    long_factors: tuple[float, ...] = ()  # and beyond it
    query_beta: float = 0.0  # queries are scaled by 1 + query_beta * log(1 + position // original_length)

    @property
    def longest_length(self) -> int:
        """Tokens that dynamic scaling can extend to, on request."""
        return int(self.factor * self.original_length) if self.kind == "dynamic" else self.extended_length

    def at_length(self, length: int, head_dim: int) -> RopeConfig:
        """Returns the RoPE of a model that serves sequences of up to `length` tokens.

        Dynamic scaling and longrope depend on the length of a sequence. Cached keys do not change as it grows, so one
        length counts for all positions of all sequences.
        """
        if self.kind == "longrope":
            factors = self.long_factors if length > self.original_length else self.factors
            return replace(self, factors=factors, long_factors=())
        if self.kind == "dynamic":
            width = self.rotary_dim or head_dim
            grown = self.factor * max(length, self.original_length) / self.original_length - (self.factor - 1)
            theta = self.theta * grown ** (width / (width - 2))
            return replace(self, kind="default", theta=theta, factor=1.0, original_length=0)
        return self

    @property
    def extended_length(self) -> int:
        """Tokens that YaRN extends to; checkpoints keep max_position_embeddings at the unscaled length."""
        return int(self.factor * self.original_length) if self.kind == "yarn" else 0


def magnitude_scale(factor: float, weight: float) -> float:
    """Returns 0.1 weight log(factor) + 1, by which YaRN scales queries and keys of contexts longer by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
