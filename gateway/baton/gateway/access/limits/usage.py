"""The words of limits: what a request asks for, what it used, and how its tenant stands after it."""

from __future__ import annotations

from dataclasses import dataclass

from baton.gateway.access.errors import LimitKind


@dataclass(frozen=True, slots=True)
class Ask:
    """What is reserved for a request before it runs."""

    input_tokens: int = 0  # all prompts together
    output_tokens: int = 0  # the most that may come, all choices together
    requests: int = 1
    only_look: bool = False  # tells, or raises, what it would; reserves nothing

    @property
    def tokens(self) -> int:
        """Both kinds."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Used:
    """What it was in the end."""

    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class Standing:
    """How a tenant stands, the request at hand counted where it was admitted."""

    requests: int = 0  # of the last minute
    input_tokens: int = 0
    output_tokens: int = 0
    reset_ms: int = 0  # until nothing of the last minute counts any more
    refused: LimitKind | None = None
    used: int = 0  # of the limit that refused
    retry_ms: int | None = None  # None: waiting does not help
