"""One call's line in the access log."""

from __future__ import annotations

import time

from baton.gateway.access.identity import Identity
from baton.gateway.access_log import log_call, rpc_client
from baton.rpc.server.server import Context


class AccessLine:
    """One call's line in the access log.

    Reads the peer at once, because gRPC crashes if it is read after the call's end.
    """

    def __init__(self, method: str, context: Context) -> None:
        self._method = method
        self._began = time.monotonic()
        self._client = rpc_client(context.peer())

    def write(self, request_id: str, outcome: str, identity: Identity | None) -> None:
        log_call(
            self._method,
            outcome,
            request_id=request_id,
            tenant=identity.tenant.name if identity is not None else "",
            client=self._client,
            seconds=time.monotonic() - self._began,
        )
