"""The parts of one transfer that have arrived. Every head of every block of every layer must arrive exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.rpc.errors import DataLoss


class Grid(NamedTuple):
    """The part of a transfer that belongs to one group."""

    layers: range  # KV layers
    num_blocks: int
    num_heads: int = 1  # of this rank


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a transfer that one piece covers."""

    layers: range  # KV layers, all of one group
    blocks: range  # indices in the group's block list
    heads: range  # of this rank
    group: int = 0

    def __str__(self) -> str:
        names = (("layers", self.layers), ("blocks", self.blocks), ("heads", self.heads))
        return ", ".join(f"{name} [{part.start}, {part.stop})" for name, part in names)


class Coverage:
    """A grid of layers, blocks and heads for each group, whose layers follow one another.

    A piece is claimed before its bytes are written, and landed afterwards.
    """

    def __init__(self, grids: Sequence[Grid]) -> None:
        self._grids = grids
        # One bit for each head of each block, by layer. For few rows that is faster than arrays.
        self._claimed = [0] * grids[-1].layers.stop
        self._num_missing = sum(len(grid.layers) * grid.num_blocks * grid.num_heads for grid in grids)
        self.num_pieces = 0

    @property
    def complete(self) -> bool:
        """Whether everything has landed."""
        return self._num_missing == 0

    def part(self, layer: int, num_layers: int, first: int, num_blocks: int, heads: tuple[int, int] | None) -> Part:
        """Returns the part that a piece covers. `heads`: first and number; None: all."""
        group = self._group_of(layer)
        first_head, num_heads = heads or (0, self._grids[group].num_heads)
        return Part(
            range(layer, layer + num_layers),
            range(first, first + num_blocks),
            range(first_head, first_head + num_heads),
            group,
        )

    def claim(self, part: Part) -> None:
        """Claims a part before it is written. Raises DataLoss if it is out of range or overlaps another."""
        layers, num_blocks, num_heads = self._grids[part.group]
        inside = part.layers.stop <= layers.stop and part.blocks.stop <= num_blocks and part.heads.stop <= num_heads
        if not (part.layers and part.blocks and part.heads and inside):
            raise DataLoss(
                f"a piece covers {part}, outside the transfer of {layers.stop} layers, {num_blocks} blocks "
                f"and {num_heads} heads"
            )
        bits = self._bits(part)
        claimed = self._claimed
        for layer in part.layers:
            if claimed[layer] & bits:
                raise DataLoss(f"a piece covers {part}, which was received before")
        for layer in part.layers:
            claimed[layer] |= bits

    def land(self, part: Part) -> None:
        """Counts a claimed part as written."""
        self._num_missing -= len(part.layers) * len(part.blocks) * len(part.heads)
        self.num_pieces += 1

    def _group_of(self, layer: int) -> int:
        """Returns a layer's group; the last one for layers out of range, which `claim` rejects."""
        for group, grid in enumerate(self._grids):
            if layer < grid.layers.stop:
                return group
        return len(self._grids) - 1

    def _bits(self, part: Part) -> int:
        """Returns the bits of one layer that a part covers."""
        num_heads = self._grids[part.group].num_heads
        if len(part.heads) == num_heads:
            return (1 << len(part.blocks) * num_heads) - 1 << part.blocks.start * num_heads
        heads = (1 << len(part.heads)) - 1 << part.heads.start
        return sum(heads << block * num_heads for block in part.blocks)
