"""The inputs of a step on a GPU, shared by all layers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from baton.worker.layers.cuda.paged import Cuts, Tiles


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
