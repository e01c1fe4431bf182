"""A prefill and a decode worker as services answer together as one worker answers alone."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from support.processes import ports
from support.processes.engine_processes import engines_of
from support.processes.worker_harness import Slot, Worker, endpoint, running_pair, running_worker, sampling, submit

from baton.v1 import control_pb2, types_pb2

MODEL = Path(__file__).resolve().parents[3] / "models" / "storyteller-7m"


def prompts(count: int, vocab_size: int = 4000) -> list[list[int]]:
    """Random prompts of many lengths; some share a prefix."""
    rng = random.Random(11)
    shared = [rng.randrange(5, vocab_size) for _ in range(96)]
    return [
        (shared if i % 3 == 0 else []) + [rng.randrange(5, vocab_size) for _ in range(rng.randrange(1, 200))]
        for i in range(count)
    ]


async def answers(worker: Worker, asked: list[list[int]], **fields: object) -> list[Slot]:
    submits = []
    for slot, prompt in enumerate(asked):
        sampled = sampling(temperature=1.0 if slot % 2 else 0.0, seed=slot, logprobs=1 if slot % 5 == 0 else None)
        submits.append(submit(slot, prompt, max_tokens=1 + slot % 12, sampling=sampled, **fields))
    return await worker.stream().generate(*submits)


def assert_equal(pair: list[Slot], alone: list[Slot]) -> None:
    for slot, (together, single) in enumerate(zip(pair, alone, strict=True)):
        assert together.failure is None, together.failure
        assert together.tokens == single.tokens, f"slot {slot}"
        assert together.finish.reason == single.finish.reason
        assert len(together.logprobs) == len(single.logprobs)


async def test_a_pair_answers_as_one_worker_does_on_the_simulator(free_port: int) -> None:
    asked = prompts(60)
    async with running_worker(free_port) as both:
        alone = await answers(both, asked)
    async with running_pair() as (prefill, decode):
        pair = await answers(decode, asked, prefill=endpoint(prefill))
        assert_equal(pair, alone)
        assert sum(slot.finish.num_transferred_tokens > 0 for slot in pair) > 20
        stats = await decode.until_idle()
        assert stats.counters.num_transfers > 20
        assert stats.counters.num_failed_transfers == 0
        await prefill.until_idle()


@pytest.mark.timeout(180)
async def test_a_pair_answers_as_one_worker_does_with_the_sample_model(free_port: int) -> None:
    asked = prompts(16)
    real = {"executor": "cpu", "model": str(MODEL), "engine_process": True, "threads": 1, "num_blocks": 600}
    async with running_worker(free_port, **real) as both:
        alone = await answers(both, asked)
    async with running_pair(**real, verify_transfers=True) as (prefill, decode):
        pair = await answers(decode, asked, prefill=endpoint(prefill))
        assert_equal(pair, alone)
        assert sum(slot.finish.num_transferred_tokens > 0 for slot in pair) > 5
        await decode.until_idle()
        await prefill.until_idle()


async def test_a_prefill_worker_that_is_not_there_costs_only_time() -> None:
    port, dead = ports.free_ports(2)
    async with running_worker(port) as decode:
        gone = types_pb2.Endpoint(worker_id="gone", epoch=1, address=f"127.0.0.1:{dead}")
        asked = prompts(10)
        slots = await answers(decode, asked, prefill=gone)
        assert_equal(slots, await answers(decode, asked))
        assert (await decode.until_idle()).counters.num_local_fallbacks > 0


async def test_a_prefill_worker_killed_midway_costs_only_time() -> None:
    asked = prompts(40)
    async with running_pair(engine_process=True, sim_slowness=2.0) as (prefill, decode):
        stream = decode.stream()
        await stream.send(*(submit(i, p, max_tokens=6, prefill=endpoint(prefill)) for i, p in enumerate(asked)))
        while not stream.slots:
            await stream.read()
        engines_of()[0].kill()  # the one that was started first
        slots = await stream.until_ended(*range(len(asked)))
        alone = decode.stream()
        assert_equal(slots, await alone.generate(*(submit(i, p, max_tokens=6) for i, p in enumerate(asked))))
        await decode.until_idle(2.0)


async def test_an_abort_during_a_hand_over_frees_the_blocks_of_both() -> None:
    async with running_pair(sim_slowness=1.0) as (prefill, decode):
        stream = decode.stream()
        asked = prompts(30)
        await stream.send(*(submit(i, p, max_tokens=500, prefill=endpoint(prefill)) for i, p in enumerate(asked)))
        await asyncio.sleep(0.05)
        await stream.send(aborts=tuple(range(0, 30, 2)))
        await asyncio.sleep(0.02)
        stream.call.cancel()
        await asyncio.gather(decode.until_idle(2.0), prefill.until_idle(2.0))


async def test_a_draining_prefill_worker_is_avoided() -> None:
    async with running_pair() as (prefill, decode):
        await prefill.control.Drain(control_pb2.DrainRequest())
        asked = prompts(6)
        slots = await answers(decode, asked, prefill=endpoint(prefill))
        assert all(slot.finish.num_transferred_tokens == 0 for slot in slots)
        assert (await decode.until_idle()).counters.num_local_fallbacks > 0


async def test_workers_of_different_models_do_not_exchange_a_byte() -> None:
    first, second = ports.free_ports(2)
    async with (
        running_worker(first, worker_id="p", sim_eos_every=3) as prefill,
        running_worker(second, worker_id="d") as decode,
    ):
        asked = prompts(6)
        slots = await answers(decode, asked, prefill=endpoint(prefill))
        assert_equal(slots, await answers(decode, asked))
        assert (await decode.stats()).counters.num_transfer_bytes == 0
