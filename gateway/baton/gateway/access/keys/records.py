"""The stored form of keys and tenants in TOML, JSON or Redis, and its validation. Reads no files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from baton.gateway.access.identity import Scope, Tenant, TenantLimits
from baton.gateway.access.keys.api_key import is_id
from baton.gateway.access.keys.directory import DEFAULT_TENANT, Directory, KeyRecord
from baton.rpc.errors import InvalidRequest

Count = Annotated[int, Meta(ge=0, le=2**52)]
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class KeyEntry(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stored key, with the SHA-256 of the key in place of the key."""

    id: str
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    tenant: str = DEFAULT_TENANT
    scopes: list[Scope] = msgspec.field(default_factory=lambda: [Scope.INFERENCE])
    expires: datetime | None = None
    created: datetime | None = None
    note: str = ""
    revoked: bool = False


class TenantEntry(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stored tenant. A limit of 0 means no limit."""

    salt: str = ""
    models: list[str] = []
    priority: Annotated[int, Meta(ge=-(2**20), le=2**20)] = 0
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    assumed_output_tokens: Annotated[int, Meta(ge=1, le=2**31)] = 1024
    requests_per_minute: Count = 0
    input_tokens_per_minute: Count = 0
    output_tokens_per_minute: Count = 0
    concurrent_requests: Count = 0
    tokens_per_month: Count = 0


class Document(Struct, kw_only=True, forbid_unknown_fields=True):
    """The content of a key file."""

    keys: list[KeyEntry] = []
    tenants: dict[str, TenantEntry] = {}


def document_of(content: Mapping[str, Any]) -> Document:
    """Validates the content of a key file. Raises InvalidRequest that names the place."""
    try:
        return msgspec.convert(content, Document)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None


def directory_of(document: Document) -> Directory:
    """Returns the keys and tenants of a document. Raises InvalidRequest for contradictions."""
    tenants = tenants_of(document.tenants)
    keys: dict[str, KeyRecord] = {}
    for entry in document.keys:
        if entry.id in keys:
            raise InvalidRequest(f"there are two keys with the id {entry.id!r}")
        keys[entry.id] = key_of(entry, tenants)
    return Directory(keys, tenants)


def tenants_of(entries: Mapping[str, TenantEntry]) -> dict[str, Tenant]:
    """Returns the tenants by name, including the default tenant. Raises InvalidRequest."""
    return {DEFAULT_TENANT: Tenant(DEFAULT_TENANT), **{name: tenant_of(name, one) for name, one in entries.items()}}


def tenant_of(name: str, entry: TenantEntry) -> Tenant:
    """Returns a tenant. Raises InvalidRequest for an invalid name."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"invalid tenant name {name!r}; give 1 to 64 letters, digits, '.', '_' and '-'")
    limits = TenantLimits(
        requests_per_minute=entry.requests_per_minute,
        input_tokens_per_minute=entry.input_tokens_per_minute,
        output_tokens_per_minute=entry.output_tokens_per_minute,
        concurrent_requests=entry.concurrent_requests,
        tokens_per_month=entry.tokens_per_month,
    )
    return Tenant(
        name=name,
        salt=entry.salt,
        models=frozenset(entry.models),
        priority=entry.priority,
        weight=entry.weight,
        limits=limits,
        assumed_output_tokens=entry.assumed_output_tokens,
    )


def key_of(entry: KeyEntry, tenants: Iterable[str]) -> KeyRecord:
    """Returns a key's record. Raises InvalidRequest for an invalid id, an unknown tenant or an empty list of scopes."""
    if not is_id(entry.id):
        raise InvalidRequest(f"invalid key id {entry.id!r}; give 10 lower-case letters and digits")
    if entry.tenant not in tenants:
        raise InvalidRequest(f"the key {entry.id} names the unknown tenant {entry.tenant!r}")
    if not entry.scopes:
        names = ", ".join(scope.value for scope in Scope)
        raise InvalidRequest(f"the key {entry.id} has no scopes; give some of {names}")
    return KeyRecord(
        id=entry.id,
        digest=bytes.fromhex(entry.sha256),
        tenant=entry.tenant,
        scopes=frozenset(entry.scopes),
        expires_at=None if entry.expires is None else timestamp_of(entry.expires),
        revoked=entry.revoked,
    )


def timestamp_of(moment: datetime) -> float:
    """Returns Unix seconds. A time without a zone is in UTC."""
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
