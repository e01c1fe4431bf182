"""What a client is told that may not, or not now. The forms of OpenAI and Anthropic are made of these elsewhere."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import grpc

from baton.rpc.errors import NoCapacity, ServiceError


class Unauthenticated(ServiceError):
    """No key, or none that is good. `reason` is for counters; clients are not told it."""

    code = grpc.StatusCode.UNAUTHENTICATED

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class LimitKind(enum.Enum):
    """Which limit; the value is how messages name it."""

    REQUESTS = "requests per min (RPM)"
    INPUT_TOKENS = "input tokens per min (TPM)"
    OUTPUT_TOKENS = "output tokens per min (TPM)"
    CONCURRENCY = "concurrent requests"
    BUDGET = "tokens per month"


class RateLimited(NoCapacity):
    """A tenant's limit. `headers` are what HTTP clients get with it; no retry_after_ms: waiting does not help.

    `standing` has OpenAI's headers of how the tenant stands.
    """

    def __init__(
        self,
        message: str,
        kind: LimitKind,
        retry_after_ms: int | None,
        headers: Mapping[str, str] | None = None,
        standing: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.kind = kind
        self.headers = dict(headers or {})
        self.standing = dict(standing or {})

    @property
    def openai_type(self) -> str:
        """OpenAI's word for the kind of limit."""
        if self.kind is LimitKind.BUDGET:
            return "insufficient_quota"
        return "tokens" if self.kind in (LimitKind.INPUT_TOKENS, LimitKind.OUTPUT_TOKENS) else "requests"

    @property
    def openai_code(self) -> str:
        """OpenAI's code."""
        return "insufficient_quota" if self.kind is LimitKind.BUDGET else "rate_limit_exceeded"
