"""The port for Envoy's external authorization."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from baton.gateway.access.gate import Gate
from baton.gateway.ext_authz.service import ExtAuthzServicer, ext_authz_service
from baton.rpc.server.server import RpcServer
from baton.rpc.tls.credentials import Tls

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 2.0  # for Checks, which take milliseconds


@contextlib.asynccontextmanager
async def ext_authz_server(
    address: str, servicer: ExtAuthzServicer, gate: Gate, tls: Tls | None, shares_port: bool = False
) -> AsyncIterator[RpcServer | None]:
    """Serves at `address`, or yields None if it is empty. Healthy once keys have been read.

    With TLS, only a peer whose certificate names an Envoy of this fleet may connect.
    """
    if not address:
        yield None
        return
    async with RpcServer(
        address,
        [ext_authz_service(servicer)],
        _GRACE_SECONDS,
        field="ext_authz_listen",
        tls=tls,
        options={"grpc.so_reuseport": int(shares_port)},
    ) as server:
        task = asyncio.get_running_loop().create_task(_report_readiness(server, gate))
        try:
            yield server
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _report_readiness(server: RpcServer, gate: Gate) -> None:
    was_ready = False
    while not was_ready:
        was_ready = gate.ready
        await server.set_ready(was_ready)
        await asyncio.sleep(_POLL_SECONDS)
