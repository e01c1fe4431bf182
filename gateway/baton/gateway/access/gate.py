"""The entry point of access control for REST, gRPC and Envoy: authenticates requests and applies limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.gateway.access.counters import AccessCounters, TenantUse
from baton.gateway.access.errors import RateLimited, Unauthenticated
from baton.gateway.access.identity import ANONYMOUS, Identity, Scope, Tenant
from baton.gateway.access.keys.ring import KeyRing
from baton.gateway.access.limits.ledger import Reservation
from baton.gateway.access.limits.limiter import Limiter
from baton.gateway.access.limits.messages import anthropic_headers, openai_headers
from baton.gateway.access.limits.usage import RequestCost, TokensUsed
from baton.rpc.errors import NotFound, PermissionDenied, ServiceError

_MISSING = (
    "You didn't provide an API key. Provide it in an Authorization header with Bearer auth "
    "(Authorization: Bearer YOUR_KEY), or in x-api-key."
)


class Permit(Protocol):
    """An admitted request."""

    def settle(self, used: TokensUsed) -> None:
        """Ends the request and gives back what it did not use. Idempotent; does not wait."""

    def headers(self, anthropic: bool = False) -> dict[str, str]:
        """Returns the tenant's remaining limits as HTTP headers."""


class Gate(Protocol):
    """Authenticates requests and applies their tenants' limits."""

    @property
    def ready(self) -> bool:
        """Returns whether keys have been read."""

    def identify(self, keys: Sequence[str], scope: Scope | None = None) -> Identity:
        """Returns the identity of these keys and checks their scope. Does not wait.

        Raises Unauthenticated, PermissionDenied, or Unavailable while no keys could be read.
        """

    def tenant_of(self, keys: Sequence[str]) -> str:
        """Returns the tenant of these keys, or an empty name. Counts nothing: the name only orders waiting requests."""

    def tenant_named(self, name: str) -> Tenant:
        """Returns a tenant, for work that outlasts its request. Raises NotFound, or Unavailable as `identify`."""

    async def admit(self, identity: Identity, cost: RequestCost) -> Permit:
        """Reserves capacity of every limit, or raises RateLimited. Returns within the timeout of Redis."""


class OpenGate:
    """Implements Gate for a gateway without keys: every request is admitted."""

    ready = True

    def identify(self, keys: Sequence[str], scope: Scope | None = None) -> Identity:
        return ANONYMOUS

    def tenant_of(self, keys: Sequence[str]) -> str:
        return ""

    def tenant_named(self, name: str) -> Tenant:
        if name:
            raise NotFound(f"there is no tenant {name!r}: this gateway has no keys", field="tenant")
        return ANONYMOUS.tenant

    async def admit(self, identity: Identity, cost: RequestCost) -> Permit:
        return FREE_PERMIT


class KeyGate:
    """Implements Gate over a key ring and a limiter."""

    def __init__(
        self,
        ring: KeyRing,
        limiter: Limiter,
        counters: AccessCounters,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._ring = ring
        self._limiter = limiter
        self._counters = counters
        self._wall_clock = wall_clock

    @property
    def ready(self) -> bool:
        return self._ring.ready

    def identify(self, keys: Sequence[str], scope: Scope | None = None) -> Identity:
        try:
            identity = self._identify(keys)
            if scope is not None:
                identity.require(scope)
        except Unauthenticated as error:
            self._counters.refused[error.reason] += 1
            raise
        except PermissionDenied:
            self._counters.refused["scope"] += 1
            raise
        except ServiceError:
            self._counters.refused["no_keys_read"] += 1
            raise
        return identity

    def tenant_of(self, keys: Sequence[str]) -> str:
        try:
            return self._identify(keys).tenant.name
        except ServiceError:
            return ""

    def tenant_named(self, name: str) -> Tenant:
        return self._ring.tenant(name)

    async def admit(self, identity: Identity, cost: RequestCost) -> Permit:
        tenant = identity.tenant
        permit: Permit = FREE_PERMIT
        if tenant.limits.any:
            try:
                permit = LimitPermit(self._limiter, await self._limiter.reserve(tenant, cost), self._wall_clock)
            except RateLimited as error:
                if not cost.dry_run:
                    self._counters.tenant(tenant.name).limited[error.kind.name.lower()] += 1
                raise
        return permit if cost.dry_run else CountedPermit(permit, self._counters.tenant(tenant.name), cost.requests)

    def _identify(self, keys: Sequence[str]) -> Identity:
        if not keys:
            raise Unauthenticated(_MISSING, "missing")
        if len(keys) > 1 and any(key != keys[0] for key in keys):
            # A proxy in front of this gateway may have checked the other key.
            raise Unauthenticated("The request has several API keys; give one.", "ambiguous")
        return self._ring.authenticate(keys[0])


class LimitPermit:
    """Implements Permit over a limiter's reservation."""

    __slots__ = ("_limiter", "_reservation", "_wall_clock")

    def __init__(self, limiter: Limiter, reservation: Reservation, wall_clock: Callable[[], float]) -> None:
        self._limiter = limiter
        self._reservation = reservation
        self._wall_clock = wall_clock

    def settle(self, used: TokensUsed) -> None:
        self._limiter.settle(self._reservation, used)

    def headers(self, anthropic: bool = False) -> dict[str, str]:
        limits, status = self._reservation.tenant.limits, self._reservation.status
        if anthropic:
            return anthropic_headers(limits, status, self._wall_clock())
        return openai_headers(limits, status)


class CountedPermit:
    """Implements Permit by wrapping another one and counting its usage for the tenant."""

    __slots__ = ("_inner", "_num_requests", "_use")

    def __init__(self, inner: Permit, use: TenantUse, num_requests: int) -> None:
        self._inner = inner
        self._use = use
        self._num_requests = num_requests
        use.requests += num_requests
        use.running += num_requests

    def settle(self, used: TokensUsed) -> None:
        self._inner.settle(used)
        use = self._use
        use.running -= self._num_requests
        self._num_requests = 0
        use.input_tokens += used.input_tokens
        use.output_tokens += used.output_tokens
        self._use = _UNCOUNTED

    def headers(self, anthropic: bool = False) -> dict[str, str]:
        return self._inner.headers(anthropic)


class _FreePermit:
    """Implements Permit for requests without limits."""

    def settle(self, used: TokensUsed) -> None:
        """Does nothing: nothing was reserved."""

    def headers(self, anthropic: bool = False) -> dict[str, str]:
        return {}


FREE_PERMIT = _FreePermit()
_UNCOUNTED = TenantUse()  # receives the usage of settled requests
