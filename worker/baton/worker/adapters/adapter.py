"""An adapter's weights in host memory, in the order of our linears."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.worker.adapters.base_model import BaseModel

ALIGNMENT = 64  # elements: each matrix begins at a multiple, so that kernels read it in whole pieces


class PartWeights(NamedTuple):
    """The update of one part: scale * b @ a."""

    a: Tensor  # [rank, in_features]
    b: Tensor  # [rows, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


Weights = Mapping[str, Mapping[int, PartWeights]]  # by the site's name and the number of its part


class Tables(NamedTuple):
    """Where in a slot each part's matrices are, in the order of the base's parts."""

    offsets: Tensor  # [num_parts, 2] int64, of a [rank, in_features] and b [rank, rows]
    ranks: Tensor  # [num_parts] int32; 0: no update
    scales: Tensor  # [num_parts] fp32


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits its base model. Its matrices are views of `memory`, as slots have it: b transposed."""

    digest: bytes  # 16 bytes
    rank: int  # the largest
    weights: Weights
    memory: Tensor  # [num_elements]
    tables: Tables

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        parts = [part for site in self.weights.values() for part in site.values()]
        return sum(part.a.nbytes + part.b.nbytes for part in parts)


def packed_adapter(digest: bytes, rank: int, weights: Weights, base: BaseModel, dtype: torch.dtype) -> Adapter:
    """Returns the adapter with its matrices in one piece of memory."""
    parts = [part for site in weights.values() for part in site.values()]
    memory = torch.zeros(packed_size((*part.a.shape, len(part.b)) for part in parts), dtype=dtype)
    packed: dict[str, dict[int, PartWeights]] = {}
    offsets = np.zeros((base.num_parts, 2), np.int64)
    ranks, scales = np.zeros(base.num_parts, np.int32), np.zeros(base.num_parts, np.float32)
    place = 0
    shared: dict[int, tuple[Tensor, int]] = {}  # narrow matrices that several parts have, and their places
    for name, site in weights.items():
        for index, part in site.items():
            column = base.columns[name] + index
            ranks[column], scales[column] = part.rank, part.scale
            if id(part.a) in shared:
                a, offsets[column, 0] = shared[id(part.a)]
            else:
                offsets[column, 0] = place
                a, place = _put(part.a, memory, place)
                shared[id(part.a)] = a, int(offsets[column, 0])
            offsets[column, 1] = place
            b, place = _put(part.b.t(), memory, place)
            packed.setdefault(name, {})[index] = PartWeights(a, b.t(), part.scale)
    tables = Tables(torch.from_numpy(offsets), torch.from_numpy(ranks), torch.from_numpy(scales))
    return Adapter(digest, rank, packed, memory[:place], tables)


def packed_size(shapes: Iterable[tuple[int, int, int]]) -> int:
    """Returns the elements of packed parts, of (rank, in_features, rows) each."""
    return sum(_aligned(rank * width) + _aligned(rank * rows) for rank, width, rows in shapes)


def _put(matrix: Tensor, memory: Tensor, place: int) -> tuple[Tensor, int]:
    """Copies a matrix to `place`. Returns it there, and the next place."""
    view = memory[place : place + matrix.numel()].view(matrix.shape).copy_(matrix)
    return view, place + _aligned(matrix.numel())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
