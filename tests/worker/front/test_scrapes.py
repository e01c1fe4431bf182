"""Scrapes of a worker during a long step, and after the engine's end."""

from __future__ import annotations

import asyncio

import pytest

from baton.v1 import control_pb2
from baton.worker.front.metrics.worker import WorkerCollector


class Device:
    num_stalls = 0
    stalled = False


class Engine:
    """Answers when it may; counts its steps by its answers."""

    def __init__(self) -> None:
        self.between_steps = asyncio.Event()
        self.between_steps.set()
        self.answered = asyncio.Event()
        self.num_asked = 0
        self.error: Exception | None = None

    async def read(self) -> control_pb2.GetStatsResponse:
        self.num_asked += 1
        await self.between_steps.wait()
        if self.error is not None:
            raise self.error
        stats = control_pb2.GetStatsResponse(counters=control_pb2.WorkerCounters(num_steps=self.num_asked))
        transfers = stats.counters.transfers
        for histogram in (transfers.transfer_seconds, transfers.exposed_seconds, transfers.tail_seconds):
            histogram.counts.append(0)
        self.answered.set()
        return stats


async def _scrape(collector) -> dict[str, float]:
    metrics = await asyncio.to_thread(lambda: list(collector.collect()))
    return {sample.name: sample.value for metric in metrics for sample in metric.samples}


@pytest.fixture
async def engine():
    return Engine()


@pytest.fixture
async def collector(engine):
    made = WorkerCollector(engine.read, Device(), asyncio.get_running_loop(), "m")
    fresh = asyncio.create_task(made.keep_fresh())
    yield made
    fresh.cancel()
    await asyncio.gather(fresh, return_exceptions=True)


async def test_a_scrape_within_a_step_takes_the_last_answer(engine, collector):
    before = (await _scrape(collector))["baton_worker_steps_total"]
    engine.between_steps.clear()
    async with asyncio.timeout(20):
        within = await _scrape(collector)
    assert within["baton_worker_up"] == 1
    assert within["baton_worker_steps_total"] == before
    engine.between_steps.set()
    async with asyncio.timeout(30):
        steps = 0.0
        while steps < before + 2:
            steps = (await _scrape(collector))["baton_worker_steps_total"]


async def test_the_first_scrape_within_a_step_finds_an_answer_too(engine, collector):
    async with asyncio.timeout(20):
        await engine.answered.wait()
        engine.between_steps.clear()
        scraped = await _scrape(collector)
    assert scraped["baton_worker_up"] == 1
    assert scraped["baton_worker_steps_total"] == 1


async def test_an_engine_that_fails_is_down(engine, collector):
    assert (await _scrape(collector))["baton_worker_up"] == 1
    engine.error = RuntimeError("gone")
    scraped = await _scrape(collector)
    assert scraped["baton_worker_up"] == 0
    assert "baton_worker_steps_total" not in scraped
