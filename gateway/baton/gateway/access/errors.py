"""Errors for denied and rate-limited clients. The formats of OpenAI and Anthropic are applied elsewhere."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import grpc

from baton.rpc.errors import NoCapacity, ServiceError


class Unauthenticated(ServiceError):
    """The request has no valid key. `reason` is for counters only and is not sent to clients."""

    code = grpc.StatusCode.UNAUTHENTICATED

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class LimitKind(enum.Enum):
    """The kind of a limit. The value is its name in messages."""

    REQUESTS = "requests per min (RPM)"
    INPUT_TOKENS = "input tokens per min (TPM)"
    OUTPUT_TOKENS = "output tokens per min (TPM)"
    CONCURRENCY = "concurrent requests"
    BUDGET = "tokens per month"


class RateLimited(NoCapacity):
    """A tenant's limit is reached. `headers` go to HTTP clients; without retry_after_ms, waiting does not help.

    `limit_headers` holds OpenAI's headers with the tenant's current usage.
    """

    def __init__(
        self,
        message: str,
        kind: LimitKind,
        retry_after_ms: int | None,
        headers: Mapping[str, str] | None = None,
        limit_headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.kind = kind
        self.headers = dict(headers or {})
        self.limit_headers = dict(limit_headers or {})

    @property
    def openai_type(self) -> str:
        """Returns OpenAI's error type for the kind of limit."""
        if self.kind is LimitKind.BUDGET:
            return "insufficient_quota"
        return "tokens" if self.kind in (LimitKind.INPUT_TOKENS, LimitKind.OUTPUT_TOKENS) else "requests"

    @property
    def openai_code(self) -> str:
        return "insufficient_quota" if self.kind is LimitKind.BUDGET else "rate_limit_exceeded"
