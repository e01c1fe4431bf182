"""Every service restarted one by one under load, as an upgrade does: no request fails."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from chaos.disturb import Disturbed, in_thread, learn
from chaos.fleet.actors import restart
from chaos.fleet.fleet import Fleet
from chaos.streams import asked
from chaos.streams.client import Client, Crowd
from chaos.streams.oracle import Seen, difference
from support.processes.stack import MODEL_NAME

_BETWEEN_SECONDS = 0.5


async def roll(fleet: Fleet, client: Client, load: float, max_tokens: int) -> Disturbed:
    """Restarts the kvstore, workers, routers and gateways, in this order, and compares the output of streams."""
    undisturbed = await learn(client, max_tokens)
    concurrency = max(2, round(load * fleet.shape.places * fleet.shape.decode / asked.MEAN_CHOICES))
    result = Disturbed()

    async def run(number: int) -> Seen:
        return await client.chat(number, asked.body_of(number, MODEL_NAME, max_tokens))

    began = time.monotonic()
    crowd = Crowd(run, concurrency, asked.NUM_REQUESTS)
    for service in fleet.services:
        await asyncio.sleep(_BETWEEN_SECONDS)
        await in_thread(fleet, partial(restart, service))
        result.faults[f"{service.plan.command} restarted"] += 1
    await asyncio.sleep(_BETWEEN_SECONDS)
    await crowd.stop()
    result.seconds = time.monotonic() - began
    result.num_streams = len(crowd.streams)
    for seen in crowd.streams:
        problem = difference(seen, undisturbed[seen.number])
        result.num_good += not problem
        if problem:
            result.wrong.append(f"{asked.kind_of(seen.number)}, request {seen.number}: {problem}")
    return result
