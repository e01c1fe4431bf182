"""Which blocks of which layers have arrived: every one exactly once, or it is an error."""

from __future__ import annotations

import numpy as np

from baton.rpc.errors import DataLoss


class Coverage:
    """A grid of layers and blocks. A piece is claimed before its bytes are written, and lands after."""

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        self._claimed = np.zeros((num_layers, num_blocks), np.bool_)
        self._num_missing = num_layers * num_blocks
        self.num_pieces = 0

    @property
    def complete(self) -> bool:
        """Everything has landed."""
        return self._num_missing == 0

    def claim(self, layer: int, first_index: int, num_blocks: int) -> None:
        """A piece is about to be written. Raises DataLoss where it lies outside, or over another."""
        num_layers, total = self._claimed.shape
        if layer >= num_layers or num_blocks == 0 or first_index + num_blocks > total:
            raise DataLoss(
                f"a piece of layer {layer}, blocks [{first_index}, {first_index + num_blocks}) came; "
                f"the transfer has {num_layers} layers of {total} blocks"
            )
        cells = self._claimed[layer, first_index : first_index + num_blocks]
        if cells.any():
            raise DataLoss(f"layer {layer}, blocks [{first_index}, {first_index + num_blocks}) came twice")
        cells[:] = True

    def land(self, num_blocks: int) -> None:
        """A claimed piece is written."""
        self._num_missing -= num_blocks
        self.num_pieces += 1
