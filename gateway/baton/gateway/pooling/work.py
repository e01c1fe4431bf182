"""Work that one answer of one piece waits for, and that ends when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from baton.gateway.http.exchange import Exchange

T = TypeVar("T")


async def result_for(exchange: Exchange, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the work's result. None: the client left, and the work was cancelled. Raises the work's error."""
    task = asyncio.current_task()
    assert task is not None, "coroutines run in tasks"
    waits, left = True, False

    def leave() -> None:
        nonlocal left
        if waits:
            left = True
            task.cancel()

    exchange.begin_work(leave, _nothing)
    try:
        return await work
    except asyncio.CancelledError:
        if left and not task.uncancel():
            return None
        raise
    finally:
        waits = False


def _nothing() -> None:
    """Does nothing: the answer is one piece, so a slow client delays nothing."""
