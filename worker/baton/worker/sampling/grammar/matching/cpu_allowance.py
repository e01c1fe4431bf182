"""The CPU time allowed for one request's masks. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CpuAllowance:
    """Allows `seconds` per token, and an excess of `seconds` in total over all tokens of a request."""

    seconds: float
    _overrun: float = 0.0

    def spend(self, seconds: float, num_tokens: int = 1) -> bool:
        """Spends the CPU time of some tokens. Returns False if the request must end."""
        self._overrun += max(0.0, seconds - num_tokens * self.seconds)
        return self._overrun <= self.seconds
