"""Calls that a client opens and resets at once, on a gateway's gRPC port."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

import pytest
from attack.usage import cpu_seconds, resident_bytes
from support.network.raw_http2 import ResetFlood
from support.processes.stack import MODEL_NAME, start_stack

from baton.v1 import inference_pb2

pytestmark = pytest.mark.timeout(180)

GENERATE = "/baton.v1.InferenceService/Generate"
REQUEST = inference_pb2.GenerateRequest(model=MODEL_NAME, text="Once upon a time").SerializeToString()
RESETS = 20_000  # of one round
CONNECTIONS = 8
EARLY_ROUNDS = 24  # heaps and gRPC's pools grow to their size, ever more slowly
LATE_ROUNDS = 8
STAYS = 20_000_000  # bytes, of all late rounds
CPU_SECONDS = 4.0  # of one round: some 0.7 on a quiet machine


@pytest.fixture
def stack(tmp_path):
    with ExitStack() as cleanup:
        yield start_stack(tmp_path, cleanup, executor="sim", decode_workers=1, prefill_workers=0)


async def flood(port, message):
    floods = [ResetFlood(port, GENERATE, message) for _ in range(CONNECTIONS)]
    await asyncio.gather(*(each.send(RESETS // CONNECTIONS) for each in floods))


@pytest.mark.parametrize("message", [None, REQUEST], ids=["without a request", "with a request"])
async def test_rapid_resets_cost_little_and_leave_nothing(stack, message):
    port = int(stack["gateway"].plan.address.rpartition(":")[2])
    pids = [stack["gateway"].process.pid]
    held = []
    for _ in range(EARLY_ROUNDS + LATE_ROUNDS):
        began = cpu_seconds(pids)
        await flood(port, message)
        assert cpu_seconds(pids) - began < CPU_SECONDS
        held.append(resident_bytes(pids))
    assert held[-1] - held[EARLY_ROUNDS - 1] < STAYS
    assert held[-1] - held[0] < 10 * STAYS
    assert stack.chat("Hello", max_tokens=2)


async def test_other_clients_are_served_during_rapid_resets(stack):
    port = int(stack["gateway"].plan.address.rpartition(":")[2])
    attack = asyncio.create_task(flood(port, REQUEST))
    num_served = 0
    while not attack.done():
        began = time.monotonic()
        assert await asyncio.to_thread(stack.chat, "Hello", max_tokens=2)
        assert time.monotonic() - began < 5.0
        num_served += 1
    await attack
    assert num_served
