"""Where a request should run: near its session's earlier requests, or on the worker that an administrator names."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Protocol

from baton.gateway.access.admin_check import AdminCheck
from baton.gateway.access.identity import Identity
from baton.gateway.rest.routing import Parameter
from baton.rpc.errors import InvalidRequest

_MOST_BYTES = 512
_SESSION_HEADER = b"x-session-id"
_WORKER_HEADER = b"x-worker-id"

SESSION = Parameter(
    "X-Session-Id",
    "Requests of a session go to one worker if that adds no delay. Goes before prompt_cache_key, previous_response_id, "
    "conversation and user, which name a session too.",
    {"type": "string", "minLength": 1, "maxLength": _MOST_BYTES},
    place="header",
)
WORKER = Parameter(
    "X-Worker-Id",
    "The only worker that may decode, for keys with the scope admin.",
    {"type": "string", "minLength": 1, "maxLength": _MOST_BYTES},
    place="header",
)

PLACING = (SESSION, WORKER)


class Sender(Protocol):
    """The parts of a call that say where it should run."""

    @property
    def identity(self) -> Identity:
        """Returns who sent it."""

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """Returns the headers by lower-case name."""


def session_of(sender: Sender, *names: str | None) -> str:
    """Returns the router's name of a request's session, or an empty text.

    The header goes before `names`, of which the first that is set counts. Raises InvalidRequest.
    """
    header = _header(sender.headers, _SESSION_HEADER)
    named = header or next((name for name in names if name), "")
    return session_name(sender.identity.tenant.name, named)


def session_name(tenant: str, name: str) -> str:
    """Returns the router's name of a tenant's session: a digest, because names may be personal. Empty: no session."""
    if not name:
        return ""
    owned = f"{len(tenant)}:{tenant}{name}".encode(errors="surrogatepass")
    return blake2b(owned, digest_size=16, person=b"baton.session").hexdigest()


def check_session_name(name: str, field: str) -> None:
    """Raises InvalidRequest for a name that is too long."""
    num_bytes = len(name.encode(errors="surrogatepass"))
    if num_bytes > _MOST_BYTES:
        raise InvalidRequest(f"{field} has {num_bytes} bytes; at most {_MOST_BYTES} are allowed", field=field)


def worker_of(sender: Sender, admin: AdminCheck) -> str:
    """Returns the worker that the header names, or an empty text. Raises PermissionDenied, InvalidRequest."""
    worker_id = _header(sender.headers, _WORKER_HEADER)
    if worker_id:
        admin.check(sender.identity, sender.headers, WORKER.name)
    return worker_id


def _header(headers: Mapping[bytes, bytes], name: bytes) -> str:
    given = headers.get(name)
    if given is None:
        return ""
    shown = name.decode()
    if not given:
        raise InvalidRequest(f"{shown} is empty; give 1 to {_MOST_BYTES} bytes, or leave it out", field=shown)
    text = given.decode("latin-1")
    if len(given) > _MOST_BYTES:
        raise InvalidRequest(f"{shown} has {len(given)} bytes; at most {_MOST_BYTES} are allowed", field=shown)
    return text
