"""Who asks, and what they may: tenants, their limits, scopes. Knows no key and no store."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field

from baton.rpc.errors import PermissionDenied

MINUTE_MS = 60_000


class Scope(enum.Enum):
    """What a key is for. `admin` includes the others."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


ALL_SCOPES = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant may use. 0: no limit."""

    requests_per_minute: int = 0
    input_tokens_per_minute: int = 0
    output_tokens_per_minute: int = 0
    concurrent_requests: int = 0
    tokens_per_month: int = 0  # input and output together; months are UTC's

    @property
    def any(self) -> bool:
        """Whether there is anything to count."""
        return bool(
            self.requests_per_minute
            or self.input_tokens_per_minute
            or self.output_tokens_per_minute
            or self.concurrent_requests
            or self.tokens_per_month
        )

    def share(self, replicas: int) -> Limits:
        """What one of so many gateways enforces by itself. Never 0 where there is a limit: 0 would be none."""

        def part(limit: int) -> int:
            return max(1, limit // replicas) if limit else 0

        return Limits(
            part(self.requests_per_minute),
            part(self.input_tokens_per_minute),
            part(self.output_tokens_per_minute),
            part(self.concurrent_requests),
            part(self.tokens_per_month),
        )


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer."""

    name: str = ""  # empty: nobody in particular
    salt: str = ""  # of its prefix cache; tenants with one salt share blocks. Empty: its name
    models: frozenset[str] = frozenset()  # that it may use; empty: all
    priority: int = 0  # lower runs earlier; requests of its own can only come after it
    weight: float = 1.0  # its share of a full fleet, against the other tenants'
    limits: Limits = field(default_factory=Limits)
    assumed_output_tokens: int = 1024  # reserved for an answer whose request gives no max_tokens

    @property
    def cache_owner(self) -> str:
        """Who shares what was kept of texts: tenants of one salt, or of one name. Empty: nobody in particular."""
        return f"salt {self.salt}" if self.salt else self.name and f"name {self.name}"

    def may_use(self, model: str) -> bool:
        """Whether the model is one of its own."""
        return not self.models or model in self.models


@dataclass(frozen=True, slots=True)
class Identity:
    """Who one request comes from."""

    tenant: Tenant
    scopes: Collection[Scope] = ALL_SCOPES
    key_id: str = ""  # empty: no key was needed

    def require(self, scope: Scope) -> None:
        """Raises PermissionDenied where the key is not for this."""
        if scope not in self.scopes and Scope.ADMIN not in self.scopes:
            raise MissingScope(f"This API key lacks the scope {scope.value}, which is needed here.")


class MissingScope(PermissionDenied):
    """The key is good, but not for this."""


ANONYMOUS = Identity(Tenant())
