"""Sampling parameters of rows, and the tokens that may be drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.worker.core import Int64
from baton.worker.sampling.noise import Float32, UInt32, UInt64


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters of rows, [num_rows] each."""

    temperature: Float32  # 0: greedy
    top_k: Int64  # 0: off
    top_p: Float32  # 1: off
    min_p: Float32  # 0: off
    seeds: UInt64

    def of(self, rows: Int64 | NDArray[np.bool_]) -> Draws:
        """Returns the parameters of some rows."""
        return Draws(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.seeds[rows])


class Candidates(NamedTuple):
    """Candidate tokens, row after row, by ascending token id."""

    rows: Int64
    token_ids: Int64
    scaled: Float32  # logits divided by temperature
    words: UInt32  # random bits of the noise; undefined for a row's only candidate

    def among(self, rows: Int64) -> Candidates:
        """Returns the candidates of a part of the batch with `rows` as those of the whole batch."""
        return self._replace(rows=rows[self.rows])


def joined(parts: Sequence[Candidates]) -> Candidates:
    """Returns all candidates of parts with different rows."""
    return parts[0] if len(parts) == 1 else Candidates(*map(np.concatenate, zip(*parts, strict=True)))


def nonzero(chosen: NDArray[np.bool_]) -> tuple[Int64, Int64]:
    """Returns np.nonzero of [num_rows, width], at a fraction of its cost."""
    return np.divmod(np.flatnonzero(chosen), chosen.shape[1])
