"""Expected output lengths by model, learned from ended requests and from the progress of others. Pure."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

_PRIOR_TOKENS = 128.0
_PRIOR_ANSWERS = 10.0  # that the prior counts for
_REFRESH_SECONDS = 1.0
_MIN_ANSWERS, _MAX_ANSWERS = 512, 16_384  # that are looked back at
_ANSWERS_PER_OPEN = 4  # of those in between: long enough ago that most have ended
_MAX_SAMPLE = 1024
_FORGET_SECONDS = 120.0  # a request without an outcome is dropped
_LEAST_LEFT = 0.05  # the least share of requests that must be left: fewer say little about the longest outputs


@dataclass(slots=True)
class _Answer:
    begun: float
    num_tokens: int = 0  # 0: it still runs
    seconds: float = 0.0


@dataclass(slots=True)
class _Model:
    answers: OrderedDict[int, _Answer] = field(default_factory=OrderedDict)  # by placement, oldest first
    num_open: int = 0
    mean: float = _PRIOR_TOKENS
    refreshed: float = float("-inf")


class OutputLengths:
    """The mean length for each model.

    Of requests placed together, the short ones end first. A fleet that has just started, or that receives more load,
    would underestimate its outputs. So running requests count as longer than their present length.
    """

    def __init__(self) -> None:
        self._models: defaultdict[str, _Model] = defaultdict(_Model)

    def begin(self, model: str, placement_id: int, now: float) -> None:
        """Records a placement."""
        known = self._models[model]
        known.answers[placement_id] = _Answer(now)
        known.num_open += 1
        most = min(max(_MIN_ANSWERS, _ANSWERS_PER_OPEN * known.num_open), _MAX_ANSWERS)
        while len(known.answers) > most:
            _, oldest = known.answers.popitem(last=False)
            known.num_open -= not oldest.num_tokens

    def end(self, model: str, placement_id: int, num_tokens: int, now: float) -> None:
        """Records an output of `num_tokens` that ended by itself. 0: it ended otherwise, and is ignored."""
        known = self._models[model]
        answer = known.answers.get(placement_id)
        if answer is None or answer.num_tokens:
            return
        known.num_open -= 1
        if not num_tokens:
            del known.answers[placement_id]
            return
        answer.num_tokens, answer.seconds = num_tokens, now - answer.begun
        if now - known.refreshed >= _REFRESH_SECONDS:
            known.refreshed = now
            known.mean = _mean(_sample(known), now)

    def expected(self, model: str, max_tokens: int) -> float:
        """Returns the expected tokens of a new request. max_tokens 0: no limit."""
        known = self._models.get(model)
        mean = max(1.0, known.mean if known is not None else _PRIOR_TOKENS)
        return min(mean, float(max_tokens)) if max_tokens else mean


def _sample(model: _Model) -> list[_Answer]:
    return list(islice(model.answers.values(), None, None, 1 + len(model.answers) // _MAX_SAMPLE))


def _mean(answers: Sequence[_Answer], now: float) -> float:
    """Returns the area under the product-limit estimate (Kaplan and Meier, 1958), drawn to the prior."""
    ended = [one for one in answers if one.num_tokens]
    if not ended:
        return _PRIOR_TOKENS
    pace = sum(one.seconds for one in ended) / sum(one.num_tokens for one in ended)
    lengths = [(float(one.num_tokens), True) for one in ended]
    if pace > 0:
        since = now - _FORGET_SECONDS
        lengths += [((now - one.begun) / pace, False) for one in answers if not one.num_tokens and one.begun > since]
    lengths.sort()
    left, mean, before = 1.0, 0.0, 0.0  # left: the part of all answers that is longer
    for place, (length, has_ended) in enumerate(lengths[: len(lengths) - int(_LEAST_LEFT * len(lengths))]):
        mean += left * (length - before)
        before = length
        if has_ended:
            left *= 1.0 - 1.0 / (len(lengths) - place)
    # Those are as long again as all are.
    mean += left * max(mean, _PRIOR_TOKENS)
    return (_PRIOR_ANSWERS * _PRIOR_TOKENS + len(ended) * mean) / (_PRIOR_ANSWERS + len(ended))
