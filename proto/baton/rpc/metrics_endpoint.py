"""How services offer their Prometheus metrics: one HTTP endpoint for the lifetime of an `async with`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import prometheus_client

from baton.rpc.address import split_address
from baton.rpc.errors import Unavailable


@contextlib.asynccontextmanager
async def metrics_endpoint(listen: str, registry: prometheus_client.CollectorRegistry) -> AsyncIterator[int]:
    """Serves `registry`, and the process's own figures, at http://`listen`/metrics; yields the port. Empty: off, 0."""
    if not listen:
        yield 0
        return
    host, port = split_address(listen, "metrics_listen")
    prometheus_client.ProcessCollector(registry=registry)
    try:
        server, thread = prometheus_client.start_http_server(port, host.strip("[]"), registry)
    except OSError as error:
        raise Unavailable(f"cannot listen on metrics_listen={listen}: {error.strerror}") from error
    try:
        yield server.server_port
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()
