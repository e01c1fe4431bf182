"""The CPU time that one request's masks may take. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CpuAllowance:
    """Each token may take `seconds`; what all tokens of a request take beyond it may be as much again, in sum."""

    seconds: float
    _overrun: float = 0.0

    def spend(self, seconds: float, num_tokens: int = 1) -> bool:
        """Counts what some tokens took together. Returns False where the request has to end."""
        self._overrun += max(0.0, seconds - num_tokens * self.seconds)
        return self._overrun <= self.seconds
