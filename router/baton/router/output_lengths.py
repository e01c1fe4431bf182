"""How long answers are, by model: learnt from finished requests. Pure."""

from __future__ import annotations

import heapq

_PRIOR_TOKENS = 128.0
_WEIGHT = 0.02  # of one request; about fifty of memory
_MOST_WAITING = 4096


class OutputLengths:
    """A running mean for each model.

    Of those that were placed together the short ones end first: each is counted when all that came before it have
    ended, or a fleet that has just begun to work would take its answers for short.
    """

    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._waiting: list[tuple[float, str, int]] = []  # a heap of what ended, by the time of its placement

    def observe(self, model: str, num_tokens: int, placed: float = 0.0, oldest: float = float("inf")) -> None:
        """A request placed then ended by itself after so many tokens. `oldest`: when the oldest was placed that has not
        ended."""
        heapq.heappush(self._waiting, (placed, model, num_tokens))
        while self._waiting and (self._waiting[0][0] < oldest or len(self._waiting) > _MOST_WAITING):
            _, name, count = heapq.heappop(self._waiting)
            mean = self._means.get(name, _PRIOR_TOKENS)
            self._means[name] = mean + _WEIGHT * (count - mean)

    def expected(self, model: str, max_tokens: int) -> float:
        """Tokens that a new request will have. max_tokens 0: no limit."""
        mean = max(1.0, self._means.get(model, _PRIOR_TOKENS))
        return min(mean, float(max_tokens)) if max_tokens else mean
