"""All keys and tenants of the last read: an immutable value that is looked up for every request."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.gateway.access.errors import Unauthenticated
from baton.gateway.access.identity import Identity, Scope, Tenant
from baton.gateway.access.keys.api_key import MAX_LENGTH, digest_of, id_of

# The tenant of keys that name none. It need not be configured.
DEFAULT_TENANT = "default"

_INCORRECT = "Incorrect API key provided."


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A stored key: its digest and its properties."""

    id: str
    digest: bytes  # SHA-256
    tenant: str = DEFAULT_TENANT
    scopes: frozenset[Scope] = frozenset({Scope.INFERENCE})
    expires_at: float | None = None  # Unix seconds; None: never
    revoked: bool = False


# Compared for unknown ids, so that these take the same time; no key has this digest.
_UNKNOWN_KEY = KeyRecord("", bytes(32))


@dataclass(frozen=True, slots=True)
class Directory:
    """Keys by id and tenants by name. The tenant of every key is present."""

    keys: Mapping[str, KeyRecord] = field(default_factory=dict)
    tenants: Mapping[str, Tenant] = field(default_factory=dict)

    def authenticate(self, key: str, now: float) -> Identity:
        """Returns the identity of a key. Raises Unauthenticated. `now` is in Unix seconds.

        Only a client with the right secret gets a reason other than "incorrect".
        """
        looked_at = key[: MAX_LENGTH + 1]
        record = self.keys.get(id_of(looked_at), _UNKNOWN_KEY)
        matches = hmac.compare_digest(digest_of(looked_at), record.digest)
        if not matches or record is _UNKNOWN_KEY:
            raise Unauthenticated(_INCORRECT, "malformed" if not id_of(looked_at) else "incorrect")
        if record.revoked:
            raise Unauthenticated("This API key has been revoked.", "revoked")
        if record.expires_at is not None and now >= record.expires_at:
            raise Unauthenticated("This API key has expired.", "expired")
        return Identity(self.tenants[record.tenant], record.scopes, record.id)
