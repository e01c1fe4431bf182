"""The values of limits: what a request reserves, what it used, and the tenant's usage after it."""

from __future__ import annotations

from dataclasses import dataclass

from baton.gateway.access.errors import LimitKind


@dataclass(frozen=True, slots=True)
class RequestCost:
    """The capacity reserved for a request before it runs."""

    input_tokens: int = 0  # all prompts together
    output_tokens: int = 0  # maximum over all choices
    requests: int = 1
    dry_run: bool = False  # check only: raises RateLimited as usual, but reserves nothing

    @property
    def tokens(self) -> int:
        """Returns input and output tokens together."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class TokensUsed:
    """The actual usage of a request."""

    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class LimitStatus:
    """A tenant's usage, including the current request if it was admitted."""

    requests: int = 0  # requests of the last minute
    input_tokens: int = 0
    output_tokens: int = 0
    reset_ms: int = 0  # time until the last minute's usage is 0
    refused: LimitKind | None = None
    used: int = 0  # usage of the limit that refused the request
    retry_ms: int | None = None  # None: waiting does not help
