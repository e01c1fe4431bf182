"""Which heads of which blocks of which layers have arrived: every one exactly once, or it is an error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.rpc.errors import DataLoss


@dataclass(frozen=True, slots=True)
class Part:
    """What one piece covers."""

    layers: range
    blocks: range  # indices into the transfer's block list
    heads: range  # of this rank's

    def __str__(self) -> str:
        names = (("layers", self.layers), ("blocks", self.blocks), ("heads", self.heads))
        return ", ".join(f"{name} [{part.start}, {part.stop})" for name, part in names)


class Coverage:
    """A grid of layers, blocks and heads. A piece is claimed before its bytes are written, and lands after."""

    def __init__(self, num_layers: int, num_blocks: int, num_heads: int = 1) -> None:
        self._claimed = np.zeros((num_layers, num_blocks, num_heads), np.bool_)
        self._num_missing = self._claimed.size
        self.num_pieces = 0

    @property
    def complete(self) -> bool:
        """Everything has landed."""
        return self._num_missing == 0

    def part(self, layer: int, num_layers: int, first: int, num_blocks: int, heads: tuple[int, int] | None) -> Part:
        """What a piece covers; heads: first and number, None: all."""
        first_head, num_heads = heads or (0, self._claimed.shape[2])
        return Part(
            range(layer, layer + num_layers),
            range(first, first + num_blocks),
            range(first_head, first_head + num_heads),
        )

    def claim(self, part: Part) -> None:
        """A piece is about to be written. Raises DataLoss where it lies outside, or over another."""
        num_layers, num_blocks, num_heads = self._claimed.shape
        inside = part.layers.stop <= num_layers and part.blocks.stop <= num_blocks and part.heads.stop <= num_heads
        if not (part.layers and part.blocks and part.heads and inside):
            raise DataLoss(
                f"a piece of {part} came; the transfer has {num_layers} layers of {num_blocks} blocks "
                f"of {num_heads} heads"
            )
        cells = self._claimed[
            part.layers.start : part.layers.stop,
            part.blocks.start : part.blocks.stop,
            part.heads.start : part.heads.stop,
        ]
        if cells.any():
            raise DataLoss(f"a piece of {part} came twice")
        cells[:] = True

    def land(self, part: Part) -> None:
        """A claimed piece is written."""
        self._num_missing -= len(part.layers) * len(part.blocks) * len(part.heads)
        self.num_pieces += 1
