"""The tokens that pass top_k, top_p and min_p, bit for bit as in baton.kernels.reference.sampling.draw.

A row's filters depend on its most likely tokens. A lower bound of the width-th largest logit selects these in a few
passes over the vocabulary, without sorting it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from baton.worker.core import Int64
from baton.worker.sampling.candidates import Candidates, Draws, nonzero
from baton.worker.sampling.noise import Float32, noise_words

_FIRST_WIDTH = 64
_WIDEN = 16
_GROUPS = 4  # per token of the width: more tokens of the width have a group of their own
_NEVER = np.float32("-inf")
_LEAST = np.finfo(np.float32).min
# Bounds of what sums and logarithms of fp32 are off, relative to the mass and for each unit of the greatest logit.
_SLACK = np.float32(1e-4)
_SLACK_OF_LOGIT = np.float32(1e-6)


class _Passing(NamedTuple):
    """Tokens that pass the filters, row after row."""

    rows: Int64
    token_ids: Int64
    scaled: Float32


def filtered(logits: Float32, draws: Draws, positions: Int64) -> Candidates:
    """Returns the tokens that pass the filters."""
    rows, token_ids, scaled = _passing(logits, draws, _FIRST_WIDTH)
    words = np.zeros(len(rows), np.uint32)
    contested = np.flatnonzero((np.bincount(rows, minlength=len(logits)) > 1)[rows])
    if len(contested):
        those = rows[contested]
        words[contested] = noise_words(draws.seeds[those], positions[those], token_ids[contested])
    return Candidates(rows, token_ids, scaled, words)


def _passing(logits: Float32, draws: Draws, width: int) -> _Passing:
    """Reads about `width` tokens per row, or more if the filters depend on them."""
    top = _most_likely(logits, draws, width)
    threshold, lowest = _threshold(logits, top, draws)
    passes = top.scaled >= threshold[top.rows]
    again = np.flatnonzero((top.num_others > 0) & ~(top.others < lowest))
    if not len(again):
        return _Passing(top.rows[passes], top.token_ids[passes], top.scaled[passes])
    passes &= ~np.isin(top.rows, again)
    more = _passing(logits[again], draws.of(again), width * _WIDEN)
    return _Passing(
        np.concatenate((top.rows[passes], again[more.rows])),
        np.concatenate((top.token_ids[passes], more.token_ids)),
        np.concatenate((top.scaled[passes], more.scaled)),
    )


class _Top(NamedTuple):
    """All tokens of at least some logit, row after row. Those of -inf are never among them."""

    rows: Int64
    token_ids: Int64
    scaled: Float32
    num_others: Int64  # [num_rows]; 0: all others are -inf
    others: Float32  # [num_rows], their greatest scaled logit at most
    descending: Float32  # [num_rows, at least top_k], `scaled` by rows, padded with -inf


def _most_likely(logits: Float32, draws: Draws, width: int) -> _Top:
    num_rows, vocab_size = logits.shape
    most = int(draws.top_k.max())
    floor = _floor(logits, min(max(width, most + 1), vocab_size))
    # NaN compares false, and so is among the tokens.
    rows, token_ids = nonzero(~(logits < np.maximum(floor, _LEAST)[:, None]))
    scaled = logits[rows, token_ids] / draws.temperature[rows]
    sizes = np.bincount(rows, minlength=num_rows)
    columns = np.arange(len(rows)) - (np.cumsum(sizes) - sizes)[rows]
    padded = np.full((num_rows, max(int(sizes.max()), most, 1)), _NEVER)
    padded[rows, columns] = scaled
    padded.sort(axis=1)
    num_others = np.where(floor == _NEVER, 0, vocab_size - sizes)
    return _Top(rows, token_ids, scaled, num_others, floor / draws.temperature, np.ascontiguousarray(padded[:, ::-1]))


def _floor(logits: Float32, width: int) -> Float32:
    """Returns a lower bound [num_rows] of each row's width-th largest logit.

    At least `width` tokens reach the width-th largest of the greatest logits of disjoint groups.
    """
    num_rows, vocab_size = logits.shape
    if width == vocab_size:
        return np.full(num_rows, _NEVER)
    groups = min(_GROUPS * width, vocab_size)
    depth = vocab_size // groups
    greatest = logits[:, : depth * groups].reshape(num_rows, depth, groups).max(1)
    greatest.partition(groups - width, axis=1)
    floor: Float32 = greatest[:, groups - width]
    return floor


def _threshold(logits: Float32, top: _Top, draws: Draws) -> tuple[Float32, Float32]:
    """Returns the lowest scaled logit [num_rows] that passes the filters, and the lowest that they depend on."""
    values = top.descending
    limited = draws.top_k > 0
    kth = np.where(limited, values[np.arange(len(values)), draws.top_k - 1], _NEVER)
    passes = values >= kth[:, None]
    if (draws.top_p < 1).any():
        passes &= _within_top_p(logits, top, passes, draws)
    least = np.where(passes, values, np.float32("inf")).min(1)
    threshold = np.maximum(least, values[:, 0] + torch.log(torch.from_numpy(draws.min_p)).numpy())
    # top_p sums all tokens that tie with the kth.
    return threshold, np.where(limited, kth, threshold)


def _within_top_p(logits: Float32, top: _Top, passes: NDArray[np.bool_], draws: Draws) -> NDArray[np.bool_]:
    """Returns which of top.descending have less than top_p of the mass before them. `passes`: those within top_k."""
    mass = _exp(top.descending - top.descending[:, :1])
    mass *= passes
    # fp64 sums, as in PyTorch.
    before = np.cumsum(mass, axis=1, dtype=np.float64).astype(np.float32)
    total = before[:, -1:].copy()
    before -= mass
    rows = np.flatnonzero((draws.top_k == 0) & (draws.top_p < 1))
    if len(rows):
        total[rows] = _totals(logits, top, before, total, draws, rows)
    top_p = draws.top_p[:, None]
    within: NDArray[np.bool_] = (before < top_p * total) | (top_p >= 1)
    return within


def _totals(logits: Float32, top: _Top, before: Float32, found: Float32, draws: Draws, rows: Int64) -> Float32:
    """Returns masses [len(rows), 1] under which as many tokens are within top_p as under that of the vocabulary.

    `found` is the mass of top.descending. PyTorch's sum is taken only where its rounding may decide.
    """
    found = found[rows]
    first, top_p, before = top.descending[rows, :1], draws.top_p[rows, None], before[rows]
    slack = _SLACK + _SLACK_OF_LOGIT * np.abs(first)
    others = _exp(top.others[rows, None] - first)
    others *= top.num_others[rows, None].astype(np.float32)
    unclear = np.flatnonzero(_differ(before, top_p * found * (1 - slack), top_p * (found + others) * (1 + slack)))
    if not len(unclear):
        return found
    scaled = logits[rows[unclear]] / draws.temperature[rows[unclear], None]
    first, top_p, before, slack = first[unclear], top_p[unclear], before[unclear], slack[unclear]
    total = np.exp(scaled - first).sum(1, keepdims=True)
    rounded = _differ(before, top_p * total * (1 - slack), top_p * total * (1 + slack))
    if rounded.any():
        total[rounded] = _exp(
            torch.logsumexp(torch.from_numpy(scaled[rounded]), 1, keepdim=True).numpy() - first[rounded]
        )
    found[unclear] = total
    return found


def _differ(before: Float32, low: Float32, high: Float32) -> NDArray[np.bool_]:
    """Returns whether `low` and `high` [num_rows, 1] separate any masses [num_rows, width]."""
    differ: NDArray[np.bool_] = ((before < low) != (before < high)).any(1)
    return differ


def _exp(values: Float32) -> Float32:
    torch.from_numpy(values).exp_()
    return values
