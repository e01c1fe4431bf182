"""Worker services with different --block-size and --dtype serve one request together."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import ports
from support.processes.worker_harness import Slot, Worker, running_worker, submit

from baton.v1 import types_pb2

MODEL = Path(__file__).resolve().parents[4] / "models" / "storyteller-7m"
REAL = {"executor": "cpu", "model": str(MODEL), "threads": 1, "num_blocks": 600, "engine_process": True}
PROMPTS = [[10 + (index * 7919 + i * 104729) % 3000 for i in range(100 + 31 * index)] for index in range(6)]


@contextlib.asynccontextmanager
async def pair(prefill: dict[str, Any], decode: dict[str, Any]) -> AsyncIterator[tuple[Worker, Worker]]:
    first, second = ports.free_ports(2)
    async with (
        running_worker(first, role="prefill", worker_id="p", verify_transfers=True, **prefill) as prefill_worker,
        running_worker(second, role="decode", worker_id="d", verify_transfers=True, **decode) as decode_worker,
    ):
        yield prefill_worker, decode_worker


async def answers(worker: Worker, prefill: Worker | None = None) -> list[Slot]:
    fields: dict[str, Any] = {}
    if prefill is not None:
        fields["prefill"] = types_pb2.Endpoint(worker_id="p", epoch=1, address=prefill.address)
    return await worker.stream().generate(*(submit(slot, one, 10, **fields) for slot, one in enumerate(PROMPTS)))


async def assert_all_transferred(prefill: Worker, decode: Worker, slots: list[Slot]) -> None:
    for slot, prompt in zip(slots, PROMPTS, strict=True):
        assert slot.failure is None
        assert slot.finish is not None
        assert slot.finish.num_transferred_tokens == len(prompt)
        assert len(slot.tokens) == 10
    stats = await decode.until_idle()
    assert (stats.counters.num_transfers, stats.counters.num_local_fallbacks) == (len(PROMPTS), 0)
    await prefill.until_idle()


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 64), (64, 16)])
async def test_block_sizes_may_differ(prefill_size: int, decode_size: int) -> None:
    async with running_worker(ports.free_ports(1)[0], block_size=decode_size) as alone:
        expected = [slot.tokens for slot in await answers(alone)]
    async with pair({"block_size": prefill_size}, {"block_size": decode_size}) as (prefill, decode):
        slots = await answers(decode, prefill)
        assert [slot.tokens for slot in slots] == expected
        await assert_all_transferred(prefill, decode, slots)


async def test_dtypes_and_block_sizes_may_differ() -> None:
    async with pair({**REAL, "dtype": "bfloat16", "block_size": 32}, {**REAL, "dtype": "float32"}) as (prefill, decode):
        await assert_all_transferred(prefill, decode, await answers(decode, prefill))
