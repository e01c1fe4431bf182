"""The inputs of a step on a CPU, shared by all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from baton.kernels.reference.attention.aligned_attention import AlignedPlan
from baton.kernels.reference.attention.paged_attention import DecodePlan, PrefillPlan
from baton.kernels.reference.attention.whole_attention import Run
from baton.worker.layers.cpu.states import StateRun


class View(NamedTuple):
    """The blocks that a layer reads."""

    group: int  # whose block tables it has
    window: int  # tokens; 0: all


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Queries of sequences of similar length: one of each decode, or several if a step verifies drafts."""

    tokens: Tensor | None  # indices of their tokens in the step; None: the first num_tokens
    num_tokens: int
    plans: dict[View, DecodePlan]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One sequence's chunk, as a range of the step's tokens."""

    start: int
    stop: int
    plans: dict[View, PrefillPlan] | dict[View, AlignedPlan]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Implements baton.worker.models.decoder.Step."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    block_ids: Sequence[Tensor]  # of each group: [num_tokens] int64, the block of each token's KV
    offsets: Tensor  # [num_tokens] int64, within its block
    decodes: list[DecodeGroup]
    prefills: list[PrefillChunk]
    states: Mapping[int, Sequence[StateRun]] = field(default_factory=dict)  # of each group of states
    rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of the positions, by RoPE table

    @property
    def fuse_norms(self) -> bool:
        """False, because PyTorch's matrix products fuse no norms."""
        return False

    @property
    def token_types(self) -> None:
        """Returns None: models with a cache have no token types."""


@dataclass(frozen=True, slots=True)
class WholeInputs:
    """Whole prompts, one after another. Implements baton.worker.models.decoder.Step."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    token_types: Tensor | None  # [num_tokens] int64
    runs: list[Run]
    rotations: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of the positions, by RoPE table

    @property
    def fuse_norms(self) -> bool:
        """False, because PyTorch's matrix products fuse no norms."""
        return False

    def split(self, num_tokens: int) -> list[WholeInputs]:
        """Returns parts of whole prompts in order. Each ends with the first prompt that brings it to `num_tokens`."""
        ends, start = [], 0
        for run in self.runs:
            for end in range(run.start + run.seq_len, run.stop + 1, run.seq_len):
                if end - start >= num_tokens:
                    ends.append(end)
                    start = end
        if start < len(self.token_ids):
            ends.append(len(self.token_ids))
        return [self._between(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def _between(self, start: int, end: int) -> WholeInputs:
        runs: list[Run] = []
        for run in self.runs:
            first, stop = max(start, run.start), min(end, run.stop)
            if first < stop:
                runs.append(Run(first - start, (stop - first) // run.seq_len, run.seq_len))
        types = self.token_types
        return WholeInputs(
            self.token_ids[start:end], self.positions[start:end], None if types is None else types[start:end], runs
        )
