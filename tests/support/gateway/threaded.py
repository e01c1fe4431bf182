"""A REST server on an event loop in another thread, for tests that drive a browser in theirs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

from support.gateway.rest_harness import Rest


@contextmanager
def in_thread(side: AbstractAsyncContextManager[Rest]) -> Iterator[str]:
    """Yields the server's address."""
    loop = asyncio.new_event_loop()
    stop, ports = asyncio.Event(), []
    started = threading.Event()

    async def serve() -> None:
        async with side as rest:
            ports.append(rest.port)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(30)
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
