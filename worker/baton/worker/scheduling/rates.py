"""Estimates the speed of this engine from its own steps. Owns no clock."""

from __future__ import annotations

from collections.abc import Iterable

_DECODE_WEIGHT = 0.05  # of one step; remembers about twenty steps
_OUTLIER = 8.0  # a step so many times slower than usual was delayed by the host, not by the load
_PREFILL_MEMORY_TOKENS = 16384.0


class Rates:
    """Decode step time and prefill speed, both 0 until known.

    A worker under load since its start may have had no step that only decodes. Until it has, the decode step time is
    the time by which a mixed step exceeds that of its prompts alone.
    """

    def __init__(self) -> None:
        self._decode_seconds = 0.0  # from steps that only decode
        self._decode_share = 0.0  # from mixed steps, until there are others
        self._tokens_per_decode = 1.0  # of the last steps
        self._prefill_tokens = 0.0
        self._prefill_seconds = 0.0

    @property
    def decode_step_seconds(self) -> float:
        """The time of one decode step."""
        return self._decode_seconds or self._decode_share

    @property
    def decode_tokens_per_step(self) -> float:
        """The tokens that a request gets of one step that decodes: more than one with speculation."""
        return self._tokens_per_decode

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens a second during prefill, without the decodes' part of mixed steps."""
        return self._prefill_tokens / self._prefill_seconds if self._prefill_seconds > 0 else 0.0

    def observe(self, num_prefill_tokens: int, num_decodes: int, seconds: float) -> None:
        """Updates the estimates from one step."""
        if seconds <= 0:
            return
        if num_prefill_tokens and num_decodes and not self._decode_seconds and self._prefill_seconds:
            self._observe_mixed(num_prefill_tokens, seconds)
        elif num_prefill_tokens:
            self._observe_prefill(num_prefill_tokens, num_decodes, seconds)
        elif num_decodes:
            self.observe_decodes((seconds,))

    def observe_tokens(self, num_decodes: int, num_tokens: int) -> None:
        """Updates the tokens of a decode from one step's decodes that got any."""
        if num_decodes:
            self._tokens_per_decode += _DECODE_WEIGHT * (num_tokens / num_decodes - self._tokens_per_decode)

    def observe_decodes(self, steps: Iterable[float]) -> None:
        """Updates the estimates from steps that only decoded, in order; each given in seconds."""
        known = self._decode_seconds
        for seconds in steps:
            if seconds <= 0:
                continue
            if known:
                most = known * _OUTLIER
                known += _DECODE_WEIGHT * ((seconds if seconds < most else most) - known)
            else:
                known = seconds
        self._decode_seconds = known

    def _observe_mixed(self, num_prefill_tokens: int, seconds: float) -> None:
        share = max(0.0, seconds - num_prefill_tokens * self._prefill_seconds / self._prefill_tokens)
        known = self._decode_share
        self._decode_share = known + _DECODE_WEIGHT * (share - known) if known else share

    def _observe_prefill(self, num_tokens: int, num_decodes: int, seconds: float) -> None:
        share = self.decode_step_seconds if num_decodes else 0.0
        seconds = max(seconds - share, seconds * 0.1)
        if self._prefill_seconds > 0:
            expected = num_tokens * self._prefill_seconds / self._prefill_tokens
            # Short chunks cost a whole step, which is the real speed. A stall of the host is not.
            seconds = min(seconds, expected * _OUTLIER + self.decode_step_seconds * _OUTLIER)
            keep = max(0.0, 1.0 - num_tokens / _PREFILL_MEMORY_TOKENS)
            self._prefill_tokens *= keep
            self._prefill_seconds *= keep
        self._prefill_tokens += num_tokens
        self._prefill_seconds += seconds
