"""Samples one token per row on the host, bit for bit as baton.kernels.reference.sampling.draw, in a few NumPy calls.

NumPy's calls on some dozens of candidates cost a fraction of PyTorch's. Logarithms, exponentials and their sums use
PyTorch, because their rounding decides tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from baton.worker.core import Int64
from baton.worker.sampling.noise import (
    Float32,
    UInt32,
    UInt64,
    gumbel_noise,
    noise_bounds,
    noise_words,
    vocabulary_noise_words,
)

_FIRST_WIDTH = 64
_WIDEN = 16
_MAX_SCORES = 1 << 16  # per pass, of rows without filters: they fit in a core's cache
_BUFFER_SIZE = 1024
_NEVER = np.float32("-inf")


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


def draw_tokens(logits: Float32, draws: Draws, positions: Int64) -> Int64:
    """Returns token ids [num_rows] for logits [num_rows, vocab_size]. `positions` are indices in the rows' outputs."""
    # For shorter rows, NumPy reads per-row scalars through a buffer of this size, at twice the cost.
    before = np.setbufsize(_BUFFER_SIZE)
    try:
        with np.errstate(all="ignore"):  # infinities are subtracted and overflow as intended
            return _draw(logits, draws, positions)
    finally:
        np.setbufsize(before)


class _Candidates(NamedTuple):
    """Candidate tokens, row after row."""

    rows: Int64
    token_ids: Int64
    scaled: Float32  # logits divided by temperature
    words: UInt32  # random bits of the noise


def _draw(logits: Float32, draws: Draws, positions: Int64) -> Int64:
    warm = draws.temperature > 0
    if not warm.any():
        return _best_logits(logits)
    filtered = warm & ((draws.top_k > 0) | (draws.top_p < 1) | (draws.min_p > 0))
    found = []
    for chosen, candidates_of in ((filtered, _filtered), (warm & ~filtered, _free)):
        if chosen.all():
            found.append(candidates_of(logits, draws, positions))
        elif chosen.any():
            rows = np.flatnonzero(chosen)
            some = candidates_of(logits[rows], draws.of(rows), positions[rows])
            found.append(some._replace(rows=rows[some.rows]))
    drawn = _best(_joined(found), len(logits))
    return drawn if warm.all() else np.where(warm, drawn, _best_logits(logits))


def _best_logits(logits: Float32) -> Int64:
    token_ids: Int64 = logits.argmax(1)
    return token_ids


def _free(logits: Float32, draws: Draws, positions: Int64) -> _Candidates:
    """Returns the candidates of rows without filters, some rows at a time."""
    step = max(1, _MAX_SCORES // logits.shape[1])
    if step >= len(logits):
        return _likely(logits, draws, positions)
    found = []
    for begin in range(0, len(logits), step):
        part = np.arange(begin, min(begin + step, len(logits)))
        some = _likely(logits[part], draws.of(part), positions[part])
        found.append(some._replace(rows=part[some.rows]))
    return _joined(found)


def _likely(logits: Float32, draws: Draws, positions: Int64) -> _Candidates:
    """Returns the tokens that may win, by bounds of their noise. Only these need the noise's logarithms."""
    vocab_size = logits.shape[1]
    words = vocabulary_noise_words(draws.seeds, positions, vocab_size)[:, :vocab_size]
    scaled = logits / draws.temperature[:, None]
    bounds = noise_bounds(words)
    bounds += scaled
    every = np.arange(len(logits))
    likely = bounds.argmax(1)
    reached = scaled[every, likely] + gumbel_noise(words[every, likely])
    # NaN compares false, so it stays a candidate, as do sums that were rounded down.
    rows, token_ids = _nonzero(~(bounds < (reached - 4 * np.spacing(np.abs(reached)))[:, None]))
    return _Candidates(rows, token_ids, scaled[rows, token_ids], words[rows, token_ids])


def _filtered(logits: Float32, draws: Draws, positions: Int64, width: int = _FIRST_WIDTH) -> _Candidates:
    """Returns the candidates among each row's `width` most likely tokens, or among more if the filters need them."""
    vocab_size = logits.shape[1]
    width = min(max(width, int(draws.top_k.max()) + 1), vocab_size)
    token_ids = _most_likely(logits, width)
    values = np.take_along_axis(logits, token_ids, 1)
    values /= draws.temperature[:, None]
    threshold, lowest = _threshold(logits, values, draws)
    passes = values >= threshold[:, None]
    wider = ~(values.min(1) < lowest)
    again = np.flatnonzero(wider) if width < vocab_size else wider[:0]
    if len(again):
        passes[again] = False
    rows, columns = _nonzero(passes)
    token_ids = token_ids[rows, columns]
    words = noise_words(draws.seeds[rows], positions[rows], token_ids)
    found = _Candidates(rows, token_ids, values[rows, columns], words)
    if not len(again):
        return found
    more = _filtered(logits[again], draws.of(again), positions[again], width * _WIDEN)
    return _joined([found, more._replace(rows=again[more.rows])])


def _most_likely(logits: Float32, width: int) -> Int64:
    """Returns token ids [num_rows, width] in any order."""
    vocab_size = logits.shape[1]
    if width == vocab_size:
        return np.broadcast_to(np.arange(vocab_size), logits.shape)
    return np.argpartition(logits, vocab_size - width, axis=1)[:, vocab_size - width :]


def _threshold(logits: Float32, values: Float32, draws: Draws) -> tuple[Float32, Float32]:
    """Returns the lowest scaled logit [num_rows] that passes the filters, and the lowest that they depend on.

    `values` [num_rows, width] are the largest scaled logits, in any order.
    """
    values = np.ascontiguousarray(np.sort(values, axis=1)[:, ::-1])
    top, top_p = values[:, :1], draws.top_p[:, None]
    limited = draws.top_k > 0
    kth = np.where(limited, values[np.arange(len(values)), draws.top_k - 1], _NEVER)
    passes = values >= kth[:, None]
    if (top_p < 1).any():
        mass = _exp(values - top)
        mass *= passes
        # fp64 sums, as in PyTorch.
        before = np.cumsum(mass, axis=1, dtype=np.float64).astype(np.float32)
        total = before[:, -1:].copy()  # `before` changes below
        rest = ~limited & (draws.top_p < 1)
        if rest.any():
            total[rest] = _total_mass(logits[rest], top[rest], draws.temperature[rest])
        before -= mass
        passes &= (before < top_p * total) | (top_p >= 1)
    least = np.where(passes, values, np.float32("inf")).min(1)
    threshold = np.maximum(least, top[:, 0] + torch.log(torch.from_numpy(draws.min_p)).numpy())
    # top_p sums all tokens that tie with the kth.
    return threshold, np.where(limited, kth, threshold)


def _total_mass(logits: Float32, top: Float32, temperature: Float32) -> Float32:
    """Returns the mass of the whole vocabulary [num_rows, 1], relative to the most likely token's."""
    scaled = torch.from_numpy(logits / temperature[:, None])
    return _exp(torch.logsumexp(scaled, 1, keepdim=True).numpy() - top)


def _nonzero(chosen: NDArray[np.bool_]) -> tuple[Int64, Int64]:
    """Returns np.nonzero of [num_rows, width], at a fraction of its cost."""
    return np.divmod(np.flatnonzero(chosen), chosen.shape[1])


def _joined(parts: Sequence[_Candidates]) -> _Candidates:
    return parts[0] if len(parts) == 1 else _Candidates(*map(np.concatenate, zip(*parts, strict=True)))


def _best(candidates: _Candidates, num_rows: int) -> Int64:
    """Returns each row's best token: the lowest id of equal scores, 0 without candidates."""
    rows, token_ids, scaled, words = candidates
    order = np.lexsort((token_ids, -(scaled + gumbel_noise(words)), rows))
    rows = rows[order]
    first = np.flatnonzero(np.diff(rows, prepend=-1))
    best = np.zeros(num_rows, np.int64)
    best[rows[first]] = token_ids[order[first]]
    return best


def _exp(values: Float32) -> Float32:
    torch.from_numpy(values).exp_()
    return values
