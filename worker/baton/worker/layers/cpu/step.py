"""One step's inputs on a CPU: what all layers share."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from baton.kernels.reference.attention.paged_attention import DecodePlan, PrefillPlan


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding sequences of like length."""

    tokens: Tensor | None  # their places among the step's tokens; None: the first num_tokens
    num_tokens: int
    plans: dict[int, DecodePlan]  # by window


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence's chunk: a run of the step's tokens."""

    start: int
    stop: int
    plans: dict[int, PrefillPlan]  # by window


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Implements baton.worker.models.decoder.Step."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    block_ids: Tensor  # [num_tokens] int64, where each token's KV goes
    offsets: Tensor  # [num_tokens] int64, within its block
    decodes: list[DecodeGroup]
    prefills: list[PrefillChunk]
    rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of the positions, by RoPE table

    @property
    def fuse_norms(self) -> bool:
        """PyTorch's products fuse nothing."""
        return False
