"""What a step needs of a paged cache, whichever attention reads it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from baton.kernels.attention.decode_cuts import DecodeCuts
from baton.kernels.attention.latent_cuts import LatentCuts
from baton.kernels.attention.latent_passes import LatentTiles
from baton.kernels.attention.prefill import PrefillTiles

Tiles = PrefillTiles | LatentTiles
Cuts = DecodeCuts | LatentCuts


class PagedCache(Protocol):
    """The cache, block tables and scratch memory of one rank."""

    cache: Tensor  # [num_layers, num_blocks, parts, heads, block_size, values]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of queries."""

    def reset(self) -> None:
        """Zeroes the counters that launches share, after a step that failed midway."""

    def tiles(self, chunk_lens: list[int], prefix_lens: list[int]) -> Tiles:
        """Returns the tiles of chunks that follow cached prefixes, for StepInputs."""

    def cut(self, seq_lens: Tensor) -> dict[int, list[Cuts]]:
        """Returns the cuts of decoding sequences by window, for StepInputs."""
