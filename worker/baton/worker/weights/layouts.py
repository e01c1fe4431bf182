"""Sources of tensors as linears expect them, whichever way a checkpoint lays them out."""

from __future__ import annotations

from torch import Tensor

from baton.worker.quantization.base import Source


def by_columns(source: Source) -> Source:
    """Returns a source of matrices that `source` keeps transposed."""

    def fill(name: str, shape: tuple[int, ...], into: Tensor) -> None:
        source(name, shape[::-1], into.t())

    return fill


def by_head(source: Source, head_dim: int) -> Source:
    """Returns a source of queries, then keys, then values, which `source` keeps head by head."""

    def fill(name: str, shape: tuple[int, ...], into: Tensor) -> None:
        by_kind = into.unflatten(0, (3, -1, head_dim))  # type: ignore[no-untyped-call]
        source(name, shape, by_kind.transpose(0, 1))

    return fill


def pairs_of_halves(into: Tensor, num_heads: int) -> Tensor:
    """Returns a view of queries or keys, whose heads' halves are rotated, in the order for a rotation of neighbours."""
    halves = into.unflatten(0, (num_heads, 2, -1))  # type: ignore[no-untyped-call]
    found: Tensor = halves.transpose(1, 2)
    return found
