"""How long answers are, by model: learnt from finished requests. Pure."""

from __future__ import annotations

_PRIOR_TOKENS = 128.0
_WEIGHT = 0.02  # of one request; about fifty of memory


class OutputLengths:
    """A running mean for each model."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def observe(self, model: str, num_tokens: int) -> None:
        """A request ended by itself after so many tokens."""
        mean = self._means.get(model, _PRIOR_TOKENS)
        self._means[model] = mean + _WEIGHT * (num_tokens - mean)

    def expected(self, model: str, max_tokens: int) -> float:
        """Tokens that a new request will have. max_tokens 0: no limit."""
        mean = max(1.0, self._means.get(model, _PRIOR_TOKENS))
        return min(mean, float(max_tokens)) if max_tokens else mean
