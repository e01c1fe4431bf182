"""Which heads of which blocks of which layers have arrived: every one exactly once, or it is an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.rpc.errors import DataLoss


class Grid(NamedTuple):
    """What a transfer brings of one group."""

    layers: range  # KV layers
    num_blocks: int
    num_heads: int = 1  # of this rank


@dataclass(frozen=True, slots=True)
class Part:
    """What one piece covers."""

    layers: range  # KV layers, all of one group
    blocks: range  # indices into the group's block list
    heads: range  # of this rank's
    group: int = 0

    def __str__(self) -> str:
        names = (("layers", self.layers), ("blocks", self.blocks), ("heads", self.heads))
        return ", ".join(f"{name} [{part.start}, {part.stop})" for name, part in names)


class Coverage:
    """A grid of layers, blocks and heads for each group. A piece is claimed before its bytes are written, and lands
    after. The grids' layers follow one another."""

    def __init__(self, grids: Sequence[Grid]) -> None:
        self._grids = grids
        # Of each layer, a bit for each head of each block: arrays would cost more, of a few rows.
        self._claimed = [0] * grids[-1].layers.stop
        self._num_missing = sum(len(grid.layers) * grid.num_blocks * grid.num_heads for grid in grids)
        self.num_pieces = 0

    @property
    def complete(self) -> bool:
        """Everything has landed."""
        return self._num_missing == 0

    def part(self, layer: int, num_layers: int, first: int, num_blocks: int, heads: tuple[int, int] | None) -> Part:
        """Returns what a piece covers; heads: first and number, None: all."""
        group = self._group_of(layer)
        first_head, num_heads = heads or (0, self._grids[group].num_heads)
        return Part(
            range(layer, layer + num_layers),
            range(first, first + num_blocks),
            range(first_head, first_head + num_heads),
            group,
        )

    def claim(self, part: Part) -> None:
        """A piece is about to be written. Raises DataLoss where it lies outside, or over another."""
        layers, num_blocks, num_heads = self._grids[part.group]
        inside = part.layers.stop <= layers.stop and part.blocks.stop <= num_blocks and part.heads.stop <= num_heads
        if not (part.layers and part.blocks and part.heads and inside):
            raise DataLoss(
                f"a piece of {part} came; the transfer has {layers.stop} layers of {num_blocks} blocks "
                f"of {num_heads} heads"
            )
        bits = self._bits(part)
        claimed = self._claimed
        for layer in part.layers:
            if claimed[layer] & bits:
                raise DataLoss(f"a piece of {part} came twice")
        for layer in part.layers:
            claimed[layer] |= bits

    def land(self, part: Part) -> None:
        """A claimed piece is written."""
        self._num_missing -= len(part.layers) * len(part.blocks) * len(part.heads)
        self.num_pieces += 1

    def _group_of(self, layer: int) -> int:
        """The last group's for layers that there are not: `claim` refuses them."""
        for group, grid in enumerate(self._grids):
            if layer < grid.layers.stop:
                return group
        return len(self._grids) - 1

    def _bits(self, part: Part) -> int:
        """Of one layer."""
        num_heads = self._grids[part.group].num_heads
        if len(part.heads) == num_heads:
            return (1 << len(part.blocks) * num_heads) - 1 << part.blocks.start * num_heads
        heads = (1 << len(part.heads)) - 1 << part.heads.start
        return sum(heads << block * num_heads for block in part.blocks)
