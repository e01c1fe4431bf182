"""The blocks of GGUF's types: their sizes, and what their bytes mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest


class Split(NamedTuple):
    """What n blocks hold: w = (stored - middle) * scale + least, of the type's `middle`."""

    stored: Tensor  # [n, num_values] of 8 bits; unsigned, unless values have 8
    scale: Tensor  # [n, num_groups] fp32
    least: Tensor | None = None  # as scale; None: 0


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks. `split` takes bytes [n, num_bytes]."""

    num_values: int
    num_bytes: int
    split: Callable[[Tensor], Split]
    bits: int  # of a value, when values are packed apart from the scales: 2, 4 or 8
    group: int  # values of a scale
    halves: tuple[int, ...]  # the bytes at which float16 begin
    middle: int = 0
    has_least: bool = False

    def refusal(self, num_columns: int) -> str:
        """Returns why rows of so many columns have no blocks; empty if they have."""
        if num_columns % self.num_values:
            return f"{num_columns} input features are no multiple of the {self.num_values} of a block"
        return ""

    def dequantize(self, blocks: Tensor) -> Tensor:
        """Returns the values of bytes [n, num_bytes], fp32 [n, num_values]."""
        stored, scale, least = self.split(blocks)
        values = stored.float()
        if self.middle:
            values -= self.middle
        grouped = values.unflatten(1, (scale.shape[1], -1)).mul_(scale.unsqueeze(2))  # type: ignore[no-untyped-call]
        if least is not None:
            grouped += least.unsqueeze(2)
        found: Tensor = grouped.flatten(1)
        return found

    def check(self, rows: Tensor, name: str) -> None:
        """Raises InvalidRequest for rows of blocks [num_rows, num_bytes], of the tensor of a name, whose scales are not
        finite."""
        blocks = rows.view(-1, self.num_bytes)
        for at in self.halves:
            wrong = ~torch.isfinite(_half(blocks, at)).flatten()
            if count := int(wrong.sum()):
                first = int(wrong.nonzero()[0]) // (len(blocks) // len(rows))
                raise InvalidRequest(
                    f"{name} holds {count} blocks whose scales are not finite, the first in row {first}: the file is "
                    "damaged; download it again",
                    field="model",
                )


def _half(blocks: Tensor, at: int) -> Tensor:
    """Returns the float16 at a byte of each block, [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _bits(blocks: Tensor, at: slice, shape: tuple[int, ...], shifts: Sequence[int], mask: int) -> Tensor:
    """Returns bits of bytes that are shaped [n, *shape], all bytes at the first shift, then at the next."""
    values = blocks[:, at].reshape(len(blocks), *shape[:-1], 1, shape[-1])
    by = torch.tensor(shifts, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    return (values >> by & mask).flatten(1)


def _nibbles(blocks: Tensor, at: slice, run: int) -> Tensor:
    """Returns the low halves of each run of bytes, then the high ones."""
    return _bits(blocks, at, (-1, run), (0, 4), 15)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Returns the bits of 4 bytes, in order, times 16."""
    values = blocks[:, at : at + 4].unsqueeze(2)
    return ((values >> torch.arange(8, dtype=torch.uint8, device=blocks.device)) & 1).flatten(1) << 4


def _q4_0(blocks: Tensor) -> Split:
    return Split(_nibbles(blocks, slice(2, 18), 16), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Split:
    return Split(_nibbles(blocks, slice(4, 20), 16), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Split:
    return Split(_nibbles(blocks, slice(6, 22), 16) | _fifth_bits(blocks, 2), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Split:
    stored = _nibbles(blocks, slice(8, 24), 16) | _fifth_bits(blocks, 4)
    return Split(stored, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Split:
    return Split(blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0))


def _q2_k(blocks: Tensor) -> Split:
    scales = blocks[:, :16]
    stored = _bits(blocks, slice(16, 80), (2, 32), (0, 2, 4, 6), 3)
    return Split(stored, _half(blocks, 80) * (scales & 15).float(), -_half(blocks, 82) * (scales >> 4).float())


def _q3_k(blocks: Tensor) -> Split:
    low = _bits(blocks, slice(96, 104), (1, 8), (0, 4), 15)
    high = _bits(blocks, slice(104, 108), (1, 4), (0, 2, 4, 6), 3)
    scales = (low | high << 4).float() - 32
    third = _bits(blocks, slice(0, 32), (1, 32), range(8), 1) << 2
    stored = _bits(blocks, slice(32, 96), (2, 32), (0, 2, 4, 6), 3) | third
    return Split(stored, _half(blocks, 108) * scales)


def _scales_and_least(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and least values of 8 groups, of 6 bits each in 12 bytes."""
    first, second, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, both & 15 | first >> 2 & 48], dim=1)
    least = torch.cat([second & 63, both >> 4 | second >> 2 & 48], dim=1)
    return _half(blocks, 0) * scales.float(), -_half(blocks, 2) * least.float()


def _q4_k(blocks: Tensor) -> Split:
    return Split(_nibbles(blocks, slice(16, 144), 32), *_scales_and_least(blocks))


def _q5_k(blocks: Tensor) -> Split:
    high = _bits(blocks, slice(16, 48), (1, 32), range(8), 1)
    return Split(_nibbles(blocks, slice(48, 176), 32) | high << 4, *_scales_and_least(blocks))


def _q6_k(blocks: Tensor) -> Split:
    low = _nibbles(blocks, slice(0, 128), 64)
    high = _bits(blocks, slice(128, 192), (2, 32), (0, 2, 4, 6), 3)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return Split(low | high << 4, _half(blocks, 208) * scales)


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(32, 18, _q4_0, 4, 32, (0,), middle=8),
    "Q4_1": BlockType(32, 20, _q4_1, 4, 32, (0, 2), has_least=True),
    "Q5_0": BlockType(32, 22, _q5_0, 8, 32, (0,), middle=16),
    "Q5_1": BlockType(32, 24, _q5_1, 8, 32, (0, 2), has_least=True),
    "Q8_0": BlockType(32, 34, _q8_0, 8, 32, (0,)),
    "Q2_K": BlockType(256, 84, _q2_k, 2, 16, (80, 82), has_least=True),
    "Q3_K": BlockType(256, 110, _q3_k, 4, 16, (108,), middle=4),
    "Q4_K": BlockType(256, 144, _q4_k, 4, 32, (0, 2), has_least=True),
    "Q5_K": BlockType(256, 176, _q5_k, 8, 32, (0, 2), has_least=True),
    "Q6_K": BlockType(256, 210, _q6_k, 8, 16, (208,), middle=32),
}
