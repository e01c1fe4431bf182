"""All keys and tenants as they were read last: one immutable value, looked up for every request."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.gateway.access.errors import Unauthenticated
from baton.gateway.access.identity import Identity, Scope, Tenant
from baton.gateway.access.keys.api_key import MAX_LENGTH, digest_of, id_of

# Of keys that name none. It need not be written down.
DEFAULT_TENANT = "default"

_INCORRECT = "Incorrect API key provided."


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is known of one key."""

    id: str
    digest: bytes  # SHA-256
    tenant: str = DEFAULT_TENANT
    scopes: frozenset[Scope] = frozenset({Scope.INFERENCE})
    expires_at: float | None = None  # Unix seconds; None: never
    revoked: bool = False


# Compared with for ids that are not known, so that they take the same time; no key has this digest.
_NOBODY = KeyRecord("", bytes(32))


@dataclass(frozen=True, slots=True)
class Directory:
    """Keys by id, tenants by name. Every key's tenant is there."""

    keys: Mapping[str, KeyRecord] = field(default_factory=dict)
    tenants: Mapping[str, Tenant] = field(default_factory=dict)

    def authenticate(self, key: str, now: float) -> Identity:
        """Whose key this is. Raises Unauthenticated. `now` in Unix seconds.

        Messages tell more than "incorrect" only to who has the secret.
        """
        looked_at = key[: MAX_LENGTH + 1]
        record = self.keys.get(id_of(looked_at), _NOBODY)
        matches = hmac.compare_digest(digest_of(looked_at), record.digest)
        if not matches or record is _NOBODY:
            raise Unauthenticated(_INCORRECT, "malformed" if not id_of(looked_at) else "incorrect")
        if record.revoked:
            raise Unauthenticated("This API key has been revoked.", "revoked")
        if record.expires_at is not None and now >= record.expires_at:
            raise Unauthenticated("This API key has expired.", "expired")
        return Identity(self.tenants[record.tenant], record.scopes, record.id)
