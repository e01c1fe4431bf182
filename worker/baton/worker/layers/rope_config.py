"""The description of a model's rotary position embedding."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("default", "linear", "llama3", "yarn")
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

    @property
    def extended_length(self) -> int:
        """Tokens that YaRN extends to; checkpoints keep max_position_embeddings at the unscaled length."""
        return int(self.factor * self.original_length) if self.kind == "yarn" else 0
