"""Time limits of steps, learnt from steps of the same shape. A step far above its limit has a stalled device. No clock.

A step may take FACTOR times the slowest recent step of its shape, and never less than the minimum. A shape is the
number of decodes, prompt tokens and context tokens, each rounded to a power of four, and whether there are masks.
NOVEL_SECONDS is the limit of the first LEARNT steps of a shape, which may compile, capture a graph or warm a cache, and
of NOVEL_STEPS after a request with new sampling features. Steps before START_STEPS have no limit, and neither have
steps while limits are paused: during a profile, an operator's call, a sleep or a change of weights. A late step raises
the known time to at most OUTLIER times its value, so that one stall does not hide the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter, ne
from typing import NamedTuple

import numpy as np

from baton.worker.core import RowInit, SamplingParams, StepPlan

FACTOR = 10.0
START_STEPS = 32
LEARNT = 4
NOVEL_STEPS = 64
NOVEL_SECONDS = 10.0
OUTLIER = 4.0
_FORGETS = 0.02  # weight of each faster step
# Sampling features that need kernels of their own.
_features_of = attrgetter(
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "logprobs",
    "logprob_token_ids", "prompt_logprobs", "suppressed_token_ids", "forbidden_sequences", "reasoning_limit",
    "top_p", "top_k", "min_p", "temperature", "extra_args",
)  # fmt: skip
_NEUTRAL = _features_of(SamplingParams())


class Shape(NamedTuple):
    """The properties that determine a step's time."""

    decodes: int
    prompt: int
    context: int
    masked: bool


@dataclass(slots=True)
class _Known:
    num_steps: int = 0
    seconds: float = 0.0  # of the slowest recent step


def shape_of(plan: StepPlan) -> Shape:
    """Returns the shape of a step."""
    context = int(np.add.reduce(plan.num_computed_tokens))
    masked = plan.masks is not None or plan.masks_follow
    return Shape(_size(plan.num_decodes), _size(plan.num_prefill_tokens), _size(context), masked)


def _size(number: int) -> int:
    """Returns the size class: 0, 1 to 3, 4 to 15, and so on."""
    return (number.bit_length() + 1) // 2


class StepLimits:
    """The limits of one engine. `least_seconds` 0: no step has a limit."""

    def __init__(self, least_seconds: float) -> None:
        self.paused = False
        self._least_seconds = least_seconds
        self._known: dict[Shape, _Known] = {}
        self._features: set[tuple[bool, ...]] = set()
        self._num_steps = 0
        self._watched_from = 0  # earlier steps have the limit of new shapes

    def limit(self, plan: StepPlan, shape: Shape) -> float:
        """Returns the seconds that the step may take. 0: no limit."""
        if plan.admitted:
            self._note_features(plan.admitted)
        known = self._known.get(shape)
        if self.paused or not self._least_seconds or self._num_steps < START_STEPS:
            return 0.0
        if known is None or known.num_steps < LEARNT or self._num_steps < self._watched_from:
            return max(self._least_seconds, NOVEL_SECONDS)
        return max(self._least_seconds, FACTOR * known.seconds)

    def observe(self, shape: Shape, seconds: float) -> None:
        """Records the device time of a step."""
        self._num_steps += 1
        known = self._known.setdefault(shape, _Known())
        if known.num_steps:
            seconds = min(seconds, OUTLIER * known.seconds)
            if seconds < known.seconds:
                seconds = known.seconds + _FORGETS * (seconds - known.seconds)
        known.num_steps += 1
        known.seconds = seconds

    def _note_features(self, admitted: list[RowInit]) -> None:
        for init in admitted:
            features = tuple(map(ne, _features_of(init.sampling), _NEUTRAL))
            if features not in self._features:
                self._features.add(features)
                self._watched_from = max(self._watched_from, self._num_steps + NOVEL_STEPS)
