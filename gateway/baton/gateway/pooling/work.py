"""Work that one answer of one piece waits for, and that ends when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from baton.gateway.http.exchange import Exchange

T = TypeVar("T")


async def result_for(exchange: Exchange, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the work's result. None: the client left, and the work was cancelled. Raises the work's error."""
    task = asyncio.ensure_future(work)

    def cancel() -> None:
        task.cancel()

    exchange.begin_work(cancel, _nothing)
    try:
        return await task
    except asyncio.CancelledError:
        task.cancel()
        if (current := asyncio.current_task()) is not None and current.cancelling():
            raise
        return None


def _nothing() -> None:
    """Does nothing: the answer is one piece, so a slow client delays nothing."""
