"""A place of a base model that adapters change. Knows no values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from baton.worker.quantization.base import Part


@dataclass(frozen=True, slots=True)
class Site:
    """A linear of ours, of one or several of the checkpoint's; the same linear of all experts; or the embedding."""

    name: str  # of the first part
    parts: Sequence[Part]  # those of an expert side by side
    in_features: int
    head_dim: int = 0  # rows of one part are queries, keys and values head by head, and ours are not; 0: they are alike
    swapped: bool = False  # the halves of one part's rows are in the other order here
    is_embedding: bool = False  # in_features is the vocabulary
    num_experts: int = 0  # 0: a linear of all tokens

    @property
    def parts_each(self) -> int:
        """Parts of a linear, or of an expert's."""
        return len(self.parts) // max(1, self.num_experts)

    @property
    def ends(self) -> tuple[int, ...]:
        """The row after each part's last one, of a linear or of an expert's."""
        return tuple(accumulate(part.rows for part in self.parts[: self.parts_each]))


class Place(NamedTuple):
    """A module of the base model."""

    site: Site
    part: int
