"""The inputs of a step on a GPU, shared by all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from baton.worker.layers.cuda.paged import Cuts, Tiles


class StateRun(NamedTuple):
    """Some sequences of a step, whose tokens follow one another, and where their states lie."""

    first: int  # of the step's sequences
    last: int
    start: int  # of the step's tokens
    stop: int
    cu_seqlens: Tensor  # [num_seqs + 1] int32, from 0
    # Of each matrix of the group: the pieces that the step's sequences read, and those that they write,
    # [num_layers, num_seqs, pieces].
    ids: Sequence[tuple[Tensor, Tensor]]
    decodes: bool  # each sequence has one token


_NO_STATES: Mapping[int, Sequence[StateRun]] = MappingProxyType({})


class StepInputs(NamedTuple):
    """Implements baton.worker.models.decoder.Step. Tensors are int32 on the device. Decodes of one token come first."""

    tokens: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slot_mapping: Tensor  # [num_tokens]
    rows: Tensor  # [num_seqs], of the block table
    seq_lens: Tensor  # [num_seqs]
    query_start_loc: Tensor  # [num_seqs + 1]
    num_decodes: int
    tiles: Tiles | None  # of the sequences after the decodes, numbered from 0
    cuts: dict[int, list[Cuts]]  # of the decodes, as PagedCache.cut returns them
    more_slots: tuple[Tensor, ...] = ()  # as slot_mapping, in the KV groups after the first
    states: Mapping[int, Sequence[StateRun]] = _NO_STATES  # of each group of states

    def slots(self, group: int) -> Tensor:
        """Returns where the tokens' keys and values go in a group, [num_tokens]."""
        return self.more_slots[group - 1] if group else self.slot_mapping

    @property
    def fuse_norms(self) -> bool:
        """False for steps with prompts: graphs record norms separately, and results must not depend on using graphs."""
        return self.tiles is None

    @property
    def token_types(self) -> None:
        """Returns None: models on GPUs have no token types."""
