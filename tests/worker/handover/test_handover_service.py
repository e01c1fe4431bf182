"""The hand-over between whole worker services: gRPC streams, engine processes, and either of them stopping."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.processes import ports
from support.processes.engine_processes import engine_of
from support.processes.worker_harness import NAMESPACE, Worker, running_worker, submit

from baton.v1 import types_pb2

NUM_REQUESTS = 8
SLOW_PREFILL = {"engine_process": True, "sim_slowness": 1.0, "sim_prefill_token_seconds": 5e-4}
SLOWER_PREFILL = {**SLOW_PREFILL, "sim_prefill_token_seconds": 1e-3}  # two seconds for all prompts


def prompt_of(index: int) -> list[int]:
    return [10 + (index * 7919 + i * 104729) % 3000 for i in range(120 + 40 * index)]


def submits(prefill: Worker | None) -> list[Any]:
    fields = {}
    if prefill is not None:
        fields["prefill"] = types_pb2.Endpoint(worker_id="p", epoch=1, address=prefill.address)
    return [submit(slot, prompt_of(slot), 12, cache_namespace=NAMESPACE, **fields) for slot in range(NUM_REQUESTS)]


@contextlib.asynccontextmanager
async def pair(prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> AsyncIterator[Any]:
    first, second = ports.free_ports(2)
    common = {"verify_transfers": True}
    async with (
        running_worker(first, role="prefill", **common, **(prefill or {})) as prefill_worker,
        running_worker(second, role="decode", **common, **(decode or {})) as decode_worker,
    ):
        yield prefill_worker, decode_worker


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running_worker(ports.free_ports(1)[0]) as worker:
            return [slot.tokens for slot in await worker.stream().generate(*submits(None))]

    return asyncio.run(run())


async def test_answers_equal_those_of_a_single_worker(expected: list[list[int]]) -> None:
    async with pair() as (prefill, decode):
        slots = await decode.stream().generate(*submits(prefill))
        assert [slot.tokens for slot in slots] == expected
        assert all(slot.finish.num_transferred_tokens for slot in slots)
        stats = await decode.until_idle()
        assert stats.counters.num_transfers == NUM_REQUESTS
        assert stats.counters.num_local_fallbacks == 0
        assert (await prefill.until_idle()).counters.num_failed_transfers == 0


async def test_a_mismatched_prefill_worker_costs_no_request(expected: list[list[int]]) -> None:
    async with pair(prefill={"sim_eos_every": 3}) as (prefill, decode):  # another model
        slots = await decode.stream().generate(*submits(prefill))
        assert [slot.tokens for slot in slots] == expected
        assert (await decode.until_idle()).counters.num_local_fallbacks == NUM_REQUESTS


@pytest.mark.parametrize("delay", [0.05, 0.2])
async def test_a_killed_prefill_engine_costs_no_request(expected: list[list[int]], delay: float) -> None:
    async with pair(prefill=SLOWER_PREFILL) as (prefill, decode):
        stream = decode.stream()
        await stream.send(*submits(prefill))
        await asyncio.sleep(delay)
        engine_of().kill()
        slots = await stream.until_ended(*range(NUM_REQUESTS), seconds=5)
        assert [slot.tokens for slot in slots] == expected
        assert (await decode.until_idle(2.0)).counters.num_local_fallbacks > 0


@pytest.mark.parametrize("delay", [0.05, 0.2])
async def test_a_prefill_engine_stopped_for_5_s_costs_no_request_and_gets_its_blocks_back(
    expected: list[list[int]], delay: float
) -> None:
    async with pair(prefill=SLOWER_PREFILL) as (prefill, decode):
        warm = submit(99, prompt_of(50), 1, prefill=types_pb2.Endpoint(worker_id="p", epoch=1, address=prefill.address))
        stream = decode.stream()
        await stream.generate(warm)
        await stream.send(*submits(prefill))
        await asyncio.sleep(delay)
        pid = engine_of().pid
        os.kill(pid, signal.SIGSTOP)
        try:
            slots = await stream.until_ended(*range(NUM_REQUESTS), seconds=4)
            assert [slot.tokens for slot in slots] == expected
            assert (await decode.until_idle(2.0)).counters.num_local_fallbacks > 0
            await asyncio.sleep(1)
        finally:
            os.kill(pid, signal.SIGCONT)
        await prefill.until_idle(2.0)


async def test_a_decode_worker_that_stops_leaves_no_block_with_the_prefill_worker() -> None:
    first, second = ports.free_ports(2)
    async with running_worker(first, role="prefill", **SLOW_PREFILL) as prefill:
        async with running_worker(second, role="decode", drain_timeout=0.0) as decode:
            await decode.stream().send(*submits(prefill))
            await asyncio.sleep(0.1)
        await prefill.until_idle(2.0)
