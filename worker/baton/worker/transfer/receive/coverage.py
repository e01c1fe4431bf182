"""Which heads of which blocks of which layers have arrived: every one exactly once, or it is an error."""

from __future__ import annotations

from dataclasses import dataclass

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
        self._shape = num_layers, num_blocks, num_heads
        # Of each layer, a bit for each head of each block: arrays would cost more, of a few rows.
        self._claimed = [0] * num_layers
        self._num_missing = num_layers * num_blocks * num_heads
        self.num_pieces = 0

    @property
    def complete(self) -> bool:
        """Everything has landed."""
        return self._num_missing == 0

    def part(self, layer: int, num_layers: int, first: int, num_blocks: int, heads: tuple[int, int] | None) -> Part:
        """What a piece covers; heads: first and number, None: all."""
        first_head, num_heads = heads or (0, self._shape[2])
        return Part(
            range(layer, layer + num_layers),
            range(first, first + num_blocks),
            range(first_head, first_head + num_heads),
        )

    def claim(self, part: Part) -> None:
        """A piece is about to be written. Raises DataLoss where it lies outside, or over another."""
        num_layers, num_blocks, num_heads = self._shape
        inside = part.layers.stop <= num_layers and part.blocks.stop <= num_blocks and part.heads.stop <= num_heads
        if not (part.layers and part.blocks and part.heads and inside):
            raise DataLoss(
                f"a piece of {part} came; the transfer has {num_layers} layers of {num_blocks} blocks "
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

    def _bits(self, part: Part) -> int:
        """Of one layer."""
        num_heads = self._shape[2]
        if len(part.heads) == num_heads:
            return (1 << len(part.blocks) * num_heads) - 1 << part.blocks.start * num_heads
        heads = (1 << len(part.heads)) - 1 << part.heads.start
        return sum(heads << block * num_heads for block in part.blocks)
