"""Chooses how many drafts a step verifies: as many as raise its tokens per second, or none. Knows no tokens.

A draft's chance is its row's acceptance rate to the power of its place. A step takes a + b T seconds for T tokens of
decoding rows; both are fitted to the last steps. Drafts that raise tokens per second by less than 2 % are left out: the
fit may be wrong by as much. Now and then a step has one draft of some rows for its time alone: after 8 steps without
any, then after twice as many, up to 512.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from baton.worker.core import Int64

Float64 = NDArray[np.float64]

_FIRST_RATE = 0.6
_PRIOR_DRAFTS = 2.0  # weight of the rate of all rows in that of one
_KEPT = 0.9  # weight of earlier drafts after each observation
_IDLE_KEPT = 0.99  # after each step without drafts, so that a row is tried again
_ALL_KEPT = 0.98
_FIRST_TRIAL, _LAST_TRIAL = 8, 512  # steps without drafts before one has some
_TRIAL_SHARE = 16  # one draft of so many rows
_LEAST_GAIN = 1.02


class StepTimes:
    """Seconds of a step as a + b T, by least squares over the last steps without prompts."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = 0.0  # means
        self._seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Records a step without prompts."""
        self._weight = _ALL_KEPT * self._weight + 1
        part = 1 / self._weight
        seconds = min(seconds, 4 * self._seconds) if self._seconds else seconds  # one stall is no trend
        tokens_off, seconds_off = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += part * tokens_off
        self._seconds += part * seconds_off
        self._variance = (1 - part) * (self._variance + part * tokens_off**2)
        self._covariance = (1 - part) * (self._covariance + part * tokens_off * seconds_off)

    def line(self) -> tuple[float, float]:
        """Returns a and b. Without steps of different sizes, b is a guess: 32 tokens cost as much as an empty step."""
        if not self._seconds:
            return 1.0, 1.0 / 32
        guess = self._seconds / (self._tokens + 32)
        slope = (self._covariance + guess) / (self._variance + 1)
        slope = min(max(slope, 0.0), self._seconds / max(1.0, self._tokens))
        return max(self._seconds - slope * self._tokens, 0.0), slope


class DraftLengths:
    """The acceptance of each row's drafts, and the cost of a step."""

    def __init__(self, num_rows: int) -> None:
        self.times = StepTimes()
        self._verified = np.zeros(num_rows)  # drafts of each row, decayed
        self._accepted = np.zeros(num_rows)
        self._idle_steps = 0  # since the last one with drafts
        self._trial_after = _FIRST_TRIAL
        self._all = np.zeros(2)  # verified and accepted drafts of all rows, decayed

    def admit(self, row: int) -> None:
        """Begins a row without a history."""
        self._verified[row] = self._accepted[row] = 0.0

    def rates(self, rows: Int64) -> Float64:
        """Returns the chance of each row's next draft."""
        verified, accepted = self._all
        prior = (accepted + _FIRST_RATE * _PRIOR_DRAFTS) / (verified + _PRIOR_DRAFTS)
        found: Float64 = (self._accepted[rows] + prior * _PRIOR_DRAFTS) / (self._verified[rows] + _PRIOR_DRAFTS)
        return found

    def worth(self, rows: Int64) -> NDArray[np.bool_]:
        """Returns which of all the step's decoding rows may gain by a draft."""
        return self.choose(rows, np.ones(len(rows), np.int64), least_gain=1.0) > 0

    def choose(self, rows: Int64, available: Int64, least_gain: float = _LEAST_GAIN) -> Int64:
        """Returns the number of drafts of each of the step's decoding rows, of those available."""
        most = int(available.max(initial=0))
        lengths = np.zeros(len(rows), np.int64)
        if not most:
            return lengths
        places = np.arange(1, most + 1)
        gains = self.rates(rows)[:, None] ** places
        gains[places > available[:, None]] = 0.0
        order = np.argsort(-gains, axis=None, kind="stable")[: int(available.sum())]
        empty, slope = self.times.line()
        count = np.arange(len(order) + 1)
        tokens = len(rows) + np.concatenate(([0.0], np.cumsum(gains.ravel()[order])))
        speed = tokens / (empty + slope * (len(rows) + count))
        best = int(np.argmax(speed))
        best = best if speed[best] >= least_gain * speed[0] else 0
        if not best and self._idle_steps >= self._trial_after:
            best = -(-len(rows) // _TRIAL_SHARE)
        # Gains fall with the place, so the chosen drafts of a row are its first ones.
        np.add.at(lengths, order[:best] // most, 1)
        return lengths

    def observe(self, rows: Int64, drafted: Int64, accepted: Int64) -> None:
        """Records a step's drafts. A row's first wrong draft says nothing of those behind it."""
        verified = np.minimum(accepted + 1, drafted)
        tried = drafted > 0
        if tried.any():
            waited = self._idle_steps >= self._trial_after
            self._trial_after = min(2 * self._trial_after, _LAST_TRIAL) if waited else self._trial_after
            self._idle_steps = 0
        else:
            self._idle_steps += 1
        kept = np.where(tried, _KEPT**verified, _IDLE_KEPT)
        self._verified[rows] = self._verified[rows] * kept + verified
        self._accepted[rows] = self._accepted[rows] * kept + np.minimum(accepted, drafted)
        self._all *= _ALL_KEPT if tried.any() else _IDLE_KEPT
        self._all += (verified.sum(), np.minimum(accepted, drafted).sum())
