"""Measures CPU seconds of work in this process. The cheapest run counts, because other programs add to the time."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

_RUNS = 3


def cheapest(work: Callable[[], object], enough: float) -> float:
    """Returns the seconds of the first run that takes less than `enough`, or else of the cheapest."""
    least = float("inf")
    for _ in range(_RUNS):
        began = time.process_time()
        work()
        least = min(least, time.process_time() - began)
        if least < enough:
            break
    return least


async def cheapest_of(work: Callable[[], Awaitable[object]], enough: float) -> float:
    """Like `cheapest`, for work on the event loop."""
    least = float("inf")
    for _ in range(_RUNS):
        began = time.process_time()
        await work()
        least = min(least, time.process_time() - began)
        if least < enough:
            break
    return least
