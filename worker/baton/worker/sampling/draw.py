"""Samples one token per row on the host, bit for bit as baton.kernels.reference.sampling.draw, in a few NumPy calls.

NumPy's calls on some dozens of candidates cost a fraction of PyTorch's. Logarithms, exponentials and their sums use
PyTorch, because their rounding decides tokens.
"""

from __future__ import annotations

import numpy as np

from baton.worker.core import Int64
from baton.worker.sampling.candidates import Candidates, Draws, joined, nonzero
from baton.worker.sampling.filters import filtered
from baton.worker.sampling.noise import Float32, gumbel_noise, noise_bounds, vocabulary_noise_words

_MAX_SCORES = 1 << 16  # per pass, of rows without filters: they fit in a core's cache
_BUFFER_SIZE = 1024


def draw_tokens(logits: Float32, draws: Draws, positions: Int64) -> Int64:
    """Returns token ids [num_rows] for logits [num_rows, vocab_size]. `positions` are indices in the rows' outputs."""
    # For shorter rows, NumPy reads per-row scalars through a buffer of this size, at twice the cost.
    before = np.setbufsize(_BUFFER_SIZE)
    try:
        with np.errstate(all="ignore"):  # infinities are subtracted and overflow as intended
            return _draw(logits, draws, positions)
    finally:
        np.setbufsize(before)


def _draw(logits: Float32, draws: Draws, positions: Int64) -> Int64:
    warm = draws.temperature > 0
    if not warm.any():
        return _best_logits(logits)
    limited = warm & ((draws.top_k > 0) | (draws.top_p < 1) | (draws.min_p > 0))
    found = []
    for chosen, candidates_of in ((limited, filtered), (warm & ~limited, _free)):
        if chosen.all():
            found.append(candidates_of(logits, draws, positions))
        elif chosen.any():
            rows = np.flatnonzero(chosen)
            some = candidates_of(logits[rows], draws.of(rows), positions[rows])
            found.append(some.among(rows))
    drawn = _best(joined(found), len(logits))
    return drawn if warm.all() else np.where(warm, drawn, _best_logits(logits))


def _best_logits(logits: Float32) -> Int64:
    token_ids: Int64 = logits.argmax(1)
    return token_ids


def _free(logits: Float32, draws: Draws, positions: Int64) -> Candidates:
    """Returns the candidates of rows without filters, some rows at a time."""
    step = max(1, _MAX_SCORES // logits.shape[1])
    if step >= len(logits):
        return _likely(logits, draws, positions)
    found = []
    for begin in range(0, len(logits), step):
        part = np.arange(begin, min(begin + step, len(logits)))
        some = _likely(logits[part], draws.of(part), positions[part])
        found.append(some.among(part))
    return joined(found)


def _likely(logits: Float32, draws: Draws, positions: Int64) -> Candidates:
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
    rows, token_ids = nonzero(~(bounds < (reached - 4 * np.spacing(np.abs(reached)))[:, None]))
    return Candidates(rows, token_ids, scaled[rows, token_ids], words[rows, token_ids])


def _best(candidates: Candidates, num_rows: int) -> Int64:
    """Returns each row's best token: the lowest id of equal scores, 0 without candidates."""
    rows, token_ids, scaled, words = candidates
    best = np.zeros(num_rows, np.int64)
    if not len(rows):
        return best
    scores = scaled + gumbel_noise(words)
    starts = np.concatenate(([0], np.flatnonzero(rows[1:] != rows[:-1]) + 1))
    highest = np.zeros(num_rows, np.float32)
    highest[rows[starts]] = np.fmax.reduceat(scores, starts)
    # Of a row's equal scores, the lowest id is assigned last.
    winners = np.flatnonzero(scores == highest[rows])[::-1]
    best[rows[winners]] = token_ids[winners]
    return best
