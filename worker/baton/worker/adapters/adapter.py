"""An adapter's weights in host memory, in the order of our linears."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class PartWeights(NamedTuple):
    """The update of one part: scale * b @ a."""

    a: Tensor  # [rank, in_features]
    b: Tensor  # [rows, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits its base model."""

    digest: bytes  # 16 bytes
    rank: int  # the largest
    weights: Mapping[str, Mapping[int, PartWeights]]  # by the site's name and the number of its part

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        parts = [part for site in self.weights.values() for part in site.values()]
        return sum(part.a.nbytes + part.b.nbytes for part in parts)
