"""Sources of tensors as linears expect them, whichever way a checkpoint lays them out."""

from __future__ import annotations

from torch import Tensor

from baton.worker.quantization.base import Source


def by_columns(source: Source) -> Source:
    """Returns a source of matrices that `source` keeps transposed."""

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        return source(name, shape[::-1]).t()

    return read


def by_head(source: Source, head_dim: int) -> Source:
    """Returns a source of queries, then keys, then values, which `source` keeps head by head."""

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        heads = source(name, shape).reshape(-1, 3, head_dim, *shape[1:])
        return heads.transpose(0, 1).reshape(shape)

    return read
