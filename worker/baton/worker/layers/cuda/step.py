"""One step's inputs on a GPU: what all layers share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from baton.kernels.attention.decode_cuts import DecodeCuts
from baton.kernels.attention.prefill import PrefillTiles


class StepInputs(NamedTuple):
    """Implements baton.worker.models.decoder.Step. On the device, int32. Sequences that decode one token come first."""

    tokens: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slot_mapping: Tensor  # [num_tokens]
    rows: Tensor  # [num_seqs], of the block table
    seq_lens: Tensor  # [num_seqs]
    query_start_loc: Tensor  # [num_seqs + 1]
    num_decodes: int
    tiles: PrefillTiles | None  # of the sequences behind the decodes, numbered from 0
    cuts: dict[int, list[DecodeCuts]]  # of the decodes, as PagedAttention.cut returns them

    @property
    def fuse_norms(self) -> bool:
        """Steps with prompts compute the same with and without graphs, which record norms on their own."""
        return self.tiles is None
