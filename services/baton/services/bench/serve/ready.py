"""Waits for a server that starts."""

from __future__ import annotations

import asyncio
import time

from baton.services.bench.datasets.source import BenchFailed
from baton.services.bench.serve.client import Client

_NAP_SECONDS = 0.2


async def described(client: Client, ready_timeout: float) -> str:
    """Returns the model's name. Waits for a server that starts. Raises BenchFailed."""
    deadline = time.monotonic() + ready_timeout
    while True:
        try:
            return await client.describe()
        except BenchFailed:
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(_NAP_SECONDS)
