"""Refuses calls of peers that the table of identities does not name. For servers whose clients show certificates."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grpc

from baton.rpc.errors import PermissionDenied
from baton.rpc.identity.identity import Identity, identity_of
from baton.rpc.identity.table import ANYBODY, accepted_by

_log = logging.getLogger(__name__)

Check = Callable[[grpc.aio.ServicerContext[Any, Any]], None]


class IdentityCheck:
    """Goes by the URI in the certificate that the handshake has verified. `refusals`, by method, is counted up."""

    def __init__(self, fleet: str, refusals: Counter[str]) -> None:
        self._fleet = fleet
        self._refusals = refusals

    def of(self, method: str) -> Check | None:
        """Returns a check for calls of `method` that raises PermissionDenied, or None if every caller is served."""
        accepted = accepted_by(method)
        if accepted is ANYBODY:
            return None

        def check(context: grpc.aio.ServicerContext[Any, Any]) -> None:
            problem = refusal(context.auth_context(), self._fleet, accepted)
            if problem:
                self._refusals[method] += 1
                _log.warning("%s of %s refused: %s", method, context.peer(), problem)
                raise PermissionDenied(f"{method} refused: {problem}")

        return check


def refusal(auth_context: Mapping[str, Iterable[bytes]], fleet: str, accepted: frozenset[str]) -> str:
    """Returns why a peer is refused, with its identity and the accepted ones. Empty: it is accepted."""
    uris = [value.decode(errors="replace") for value in auth_context.get("peer_uri", ())]
    identity = identity_of(uris)
    if identity is not None and identity.fleet == fleet and identity.service in accepted:
        return ""
    wanted = ", ".join(f"spiffe://baton/{fleet}/{service}/*" for service in sorted(accepted)) or "no service"
    return f"the certificate shown is of {_shown(identity, uris)}; accepted: {wanted}"


def _shown(identity: Identity | None, uris: list[str]) -> str:
    if identity is not None:
        return identity.uri
    return f"{', '.join(uris)}, which is no identity" if uris else "a peer without a URI"
