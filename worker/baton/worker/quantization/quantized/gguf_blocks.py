"""The blocks of GGUF's types: their sizes, and what their bytes mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks. `dequantize` takes bytes [n, num_bytes] and returns fp32 [n, num_values]."""

    num_values: int
    num_bytes: int
    dequantize: Callable[[Tensor], Tensor]
    # Returns integers from 0 to 15 [n, num_values], and the scale and the least value of each of n's groups, in fp32.
    int4: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None


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


def _int4_of_q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = _half(blocks, 0)
    return _nibbles(blocks, slice(2, 18), 16), scale, -8 * scale


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks, slice(2, 18), 16).float() - 8) * _half(blocks, 0)


def _int4_of_q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _nibbles(blocks, slice(4, 20), 16), _half(blocks, 0), _half(blocks, 2)


def _q4_1(blocks: Tensor) -> Tensor:
    stored, scale, least = _int4_of_q4_1(blocks)
    return stored.float() * scale + least


def _q5_0(blocks: Tensor) -> Tensor:
    stored = _nibbles(blocks, slice(6, 22), 16) | _fifth_bits(blocks, 2)
    return (stored.float() - 16) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    stored = _nibbles(blocks, slice(8, 24), 16) | _fifth_bits(blocks, 4)
    return stored.float() * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _grouped(stored: Tensor, scale: Tensor) -> Tensor:
    """Returns values times the scale of their group, scale [n, num_groups]."""
    grouped = stored.float().unflatten(1, (scale.shape[1], -1))  # type: ignore[no-untyped-call]
    scaled: Tensor = grouped.mul_(scale.unsqueeze(2)).flatten(1)
    return scaled


def _shifted(stored: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """Returns stored * scale - least of each group."""
    grouped = stored.float().unflatten(1, (scale.shape[1], -1))  # type: ignore[no-untyped-call]
    shifted: Tensor = grouped.mul_(scale.unsqueeze(2)).sub_(least.unsqueeze(2)).flatten(1)
    return shifted


def _q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16]
    stored = _bits(blocks, slice(16, 80), (2, 32), (0, 2, 4, 6), 3)
    return _shifted(stored, _half(blocks, 80) * (scales & 15).float(), _half(blocks, 82) * (scales >> 4).float())


def _q3_k(blocks: Tensor) -> Tensor:
    low = _bits(blocks, slice(96, 104), (1, 8), (0, 4), 15)
    high = _bits(blocks, slice(104, 108), (1, 4), (0, 2, 4, 6), 3)
    scales = (low | high << 4).float() - 32
    absent = _bits(blocks, slice(0, 32), (1, 32), range(8), 1) ^ 1
    stored = _bits(blocks, slice(32, 96), (2, 32), (0, 2, 4, 6), 3).float() - (absent << 2).float()
    return _grouped(stored, _half(blocks, 108) * scales)


def _scales_and_least(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and least values of 8 groups, of 6 bits each in 12 bytes."""
    first, second, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, both & 15 | first >> 2 & 48], dim=1)
    least = torch.cat([second & 63, both >> 4 | second >> 2 & 48], dim=1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * least.float()


def _int4_of_q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale, least = _scales_and_least(blocks)
    return _nibbles(blocks, slice(16, 144), 32), scale, -least


def _q4_k(blocks: Tensor) -> Tensor:
    return _shifted(_nibbles(blocks, slice(16, 144), 32), *_scales_and_least(blocks))


def _q5_k(blocks: Tensor) -> Tensor:
    high = _bits(blocks, slice(16, 48), (1, 32), range(8), 1)
    return _shifted(_nibbles(blocks, slice(48, 176), 32) | high << 4, *_scales_and_least(blocks))


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks, slice(0, 128), 64)
    high = _bits(blocks, slice(128, 192), (2, 32), (0, 2, 4, 6), 3)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _grouped((low | high << 4).float() - 32, _half(blocks, 208) * scales)


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(32, 18, _q4_0, _int4_of_q4_0),
    "Q4_1": BlockType(32, 20, _q4_1, _int4_of_q4_1),
    "Q5_0": BlockType(32, 22, _q5_0),
    "Q5_1": BlockType(32, 24, _q5_1),
    "Q8_0": BlockType(32, 34, _q8_0),
    "Q2_K": BlockType(256, 84, _q2_k),
    "Q3_K": BlockType(256, 110, _q3_k),
    "Q4_K": BlockType(256, 144, _q4_k, _int4_of_q4_k),
    "Q5_K": BlockType(256, 176, _q5_k),
    "Q6_K": BlockType(256, 210, _q6_k),
}
