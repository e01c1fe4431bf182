"""Tenants, their limits and scopes. Knows nothing of keys or stores."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field

from baton.rpc.errors import PermissionDenied

MINUTE_MS = 60_000


class Scope(enum.Enum):
    """What a key permits. `admin` includes the others."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


ALL_SCOPES = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a tenant. 0 means no limit."""

    requests_per_minute: int = 0
    input_tokens_per_minute: int = 0
    output_tokens_per_minute: int = 0
    concurrent_requests: int = 0
    tokens_per_month: int = 0  # input and output together; months are in UTC

    @property
    def any(self) -> bool:
        """Returns whether there is any limit."""
        return bool(
            self.requests_per_minute
            or self.input_tokens_per_minute
            or self.output_tokens_per_minute
            or self.concurrent_requests
            or self.tokens_per_month
        )

    def share(self, replicas: int) -> TenantLimits:
        """Returns the part that one of `replicas` gateways enforces alone.

        At least 1 for each limit, as 0 means no limit.
        """

        def part(limit: int) -> int:
            return max(1, limit // replicas) if limit else 0

        return TenantLimits(
            part(self.requests_per_minute),
            part(self.input_tokens_per_minute),
            part(self.output_tokens_per_minute),
            part(self.concurrent_requests),
            part(self.tokens_per_month),
        )


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str = ""  # empty: anonymous
    salt: str = ""  # namespace of its prefix cache; tenants with the same salt share blocks. Empty: its name
    models: frozenset[str] = frozenset()  # models it may use; empty: all
    priority: int = 0  # lower runs earlier; the client's priority can only lower it further
    weight: float = 1.0  # relative share of a full fleet
    limits: TenantLimits = field(default_factory=TenantLimits)
    assumed_output_tokens: int = 1024  # reserved if a request gives no max_tokens

    @property
    def cache_owner(self) -> str:
        """Returns the namespace of cached texts: the salt, or else the name. Empty for anonymous requests."""
        return f"salt {self.salt}" if self.salt else self.name and f"name {self.name}"

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models


@dataclass(frozen=True, slots=True)
class Identity:
    """The authenticated sender of a request."""

    tenant: Tenant
    scopes: Collection[Scope] = ALL_SCOPES
    key_id: str = ""  # empty: no key was needed
    background: bool = False  # its requests are lines of batches, so no client waits for them

    def require(self, scope: Scope) -> None:
        """Raises MissingScope if the key lacks the scope."""
        if scope not in self.scopes and Scope.ADMIN not in self.scopes:
            raise MissingScope(f"This API key lacks the required scope {scope.value}.")


class MissingScope(PermissionDenied):
    """The key is valid but lacks a scope."""


ANONYMOUS = Identity(Tenant())
