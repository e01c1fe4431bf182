"""Cuts the reads of a load into pieces: where the bytes lie, and which views they fill. Reads nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Coding:
    """How a file holds numbers: in blocks of some values and bytes. A row of a matrix has whole blocks."""

    dtype: torch.dtype  # of the decoded values
    block_values: int = 1
    block_bytes: int = 0  # 0: a value of `dtype`
    decode: Callable[[Tensor], Tensor] | None = None  # from bytes [n]; None: the file holds values of `dtype`

    def num_bytes(self, num_values: int) -> int:
        """Returns the bytes of so many values."""
        return num_values // self.block_values * (self.block_bytes or self.dtype.itemsize)


class Place(NamedTuple):
    """Where a tensor lies in a file."""

    path: Path
    start: int  # byte offset
    coding: Coding


class Fill(NamedTuple):
    """A view, and the place of its elements, which lie there in the order of its dimensions."""

    place: Place
    into: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.place.coding.num_bytes(self.into.numel())

    @property
    def end(self) -> int:
        """The byte offset behind them."""
        return self.place.start + self.num_bytes


@dataclass(frozen=True, slots=True)
class Read:
    """A range of a file that is read at once."""

    path: Path
    start: int
    num_bytes: int
    fills: Sequence[Fill]


def planned_reads(fills: Iterable[Fill], most_bytes: int) -> list[Read]:
    """Returns the reads of at most this size, in the order of each file, and several files by turns."""
    by_path: dict[Path, list[Fill]] = {}
    for fill in fills:
        by_path.setdefault(fill.place.path, []).extend(_cut(fill, most_bytes))
    files = [_joined(sorted(parts, key=_start), most_bytes) for _, parts in sorted(by_path.items())]
    return [read for turn in zip_longest(*files) for read in turn if read is not None]


def _start(fill: Fill) -> int:
    return fill.place.start


def _cut(fill: Fill, most_bytes: int) -> Iterator[Fill]:
    """Yields parts of at most this size, cut along the first dimensions."""
    into, place = fill.into, fill.place
    if not into.numel():
        return
    if fill.num_bytes <= most_bytes:
        yield fill
        return
    unit = 1 if into.dim() > 1 else place.coding.block_values
    unit_bytes = fill.num_bytes * unit // into.shape[0]
    step = max(1, most_bytes // unit_bytes) * unit
    for first in range(0, into.shape[0], step):
        start = place._replace(start=place.start + first // unit * unit_bytes)
        if unit_bytes > most_bytes and into.dim() > 1:
            yield from _cut(Fill(start, into[first]), most_bytes)
        else:
            yield Fill(start, into[first : first + step])


def _joined(fills: Sequence[Fill], most_bytes: int) -> list[Read]:
    """Returns reads of neighbouring fills."""
    reads: list[Read] = []
    group: list[Fill] = []
    for fill in fills:
        if group and (fill.place.start != group[-1].end or fill.end - group[0].place.start > most_bytes):
            reads.append(_read(group))
            group = []
        group.append(fill)
    return [*reads, _read(group)] if group else reads


def _read(group: Sequence[Fill]) -> Read:
    start = group[0].place.start
    return Read(group[0].place.path, start, group[-1].end - start, tuple(group))
