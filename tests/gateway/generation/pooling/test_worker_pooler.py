"""Texts over a scripted router and scripted workers: groups, clients that leave, losses, and errors of one text."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.gateway.scripted_services import MODEL, ScriptedRouter, ScriptedWorker, until

from baton.gateway.core import PooledText, PoolRequest
from baton.gateway.generation.generator import WorkerGenerator
from baton.gateway.generation.pooler import WorkerPooler
from baton.gateway.generation.workers.stream_pool import WorkerStreams
from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.models.served import ModelCatalog, ServedModel, load_served_model
from baton.gateway.routers.client import RouterClient, RouterTimes
from baton.rpc.errors import DataLoss, DeadlineExceeded, InvalidRequest, ServiceError
from baton.v1 import types_pb2, worker_pb2

SAMPLE = Path(__file__).parents[4] / "models" / "storyteller-7m"
TIMES = RouterTimes(attempt=0.5, total=1.0, no_worker=0.2, first_delay=0.02, report_interval=0.01)
EMBED = types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_EMBED)


class PoolingWorker(ScriptedWorker):
    """Returns the first token of each text as its vector. Fails the texts that begin with a token of `bad`."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(worker_id, lambda _: [])
        self.bad: dict[int, ServiceError] = {}

    def _finish(self, frame: Any, submit: worker_pb2.SubmitRequest, new: list[int]) -> None:
        first = submit.prompt_token_ids[0]
        if (error := self.bad.get(first)) is not None:
            code = error.code.value[0]
            frame.failures.add(slot=submit.slot, code=code, message=error.message, detail=error.detail)
            return
        frame.pooled.add(slot=submit.slot, num_vectors=1, values=struct.pack("<f", first))
        frame.finishes.add(slot=submit.slot, reason=types_pb2.FINISH_REASON_STOP, num_cached_tokens=1)


@dataclass
class Fleet:
    """Scripted workers, and a pooler over them."""

    workers: list[PoolingWorker]
    router: ScriptedRouter
    pooler: WorkerPooler
    streams: WorkerStreams

    async def pool(self, texts: Sequence[Sequence[int]], **fields: Any) -> list[PooledText]:
        async with asyncio.timeout(30):
            return await self.pooler.pool(PoolRequest("r", MODEL.name, texts, EMBED, **fields))


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return load_served_model(str(SAMPLE))


@asynccontextmanager
async def running_fleet(model: ServedModel, num_workers: int) -> AsyncIterator[Fleet]:
    counters, catalog = GenerationCounters(), ModelCatalog([model])
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(PoolingWorker(f"w{number}")) for number in range(num_workers)]
        router = await stack.enter_async_context(ScriptedRouter(list(workers)))
        client = await stack.enter_async_context(RouterClient([router.address], catalog.update, counters, TIMES))
        streams = await stack.enter_async_context(WorkerStreams(counters))
        await until(lambda: catalog.ready)
        yield Fleet(workers, router, WorkerGenerator(catalog, client, streams, counters).pooler, streams)


def texts_of(count: int) -> list[list[int]]:
    return [[10 + number] * 3 for number in range(count)]


async def test_many_texts_come_back_in_their_order(model: ServedModel) -> None:
    async with running_fleet(model, 1) as fleet:
        found = await fleet.pool(texts_of(100))
        assert [struct.unpack("<f", one.values)[0] for one in found] == [10 + number for number in range(100)]
        assert len(fleet.router.places) == 4  # groups of 32


@pytest.mark.parametrize("reached", ["queued", "placing"])
async def test_texts_of_a_client_that_left_are_aborted_and_the_others_never_sent(
    model: ServedModel, reached: str
) -> None:
    async with running_fleet(model, 1) as fleet:
        (worker,) = fleet.workers
        worker.steps_last = True
        fleet.router.hangs = reached == "placing"
        work = asyncio.create_task(fleet.pool(texts_of(200)))
        sent = 0 if fleet.router.hangs else 4 * 32  # four groups at once, of seven
        await until(lambda: len(worker.submits) == sent and len(fleet.router.places) == 4)
        work.cancel()
        await asyncio.wait([work])
        assert work.cancelled()
        await until(lambda: sorted(worker.aborts) == sorted(one.slot for one in worker.submits))
        await until(lambda: fleet.streams.num_active == 0)
        fleet.router.hangs = worker.steps_last = False
        assert len(await fleet.pool(texts_of(2))) == 2
        assert len(worker.submits) == sent + 2


async def test_a_deadline_aborts_all_texts(model: ServedModel) -> None:
    async with running_fleet(model, 1) as fleet:
        (worker,) = fleet.workers
        worker.steps_last = True
        with pytest.raises(DeadlineExceeded, match="within 300 ms"):
            await fleet.pool(texts_of(3), timeout_ms=300)
        await until(lambda: len(worker.aborts) == len(worker.submits))


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(
    "error",
    [DataLoss("the model computed values that are not finite numbers"), InvalidRequest("token 9 is out of range")],
    ids=["not finite", "invalid"],
)
async def test_a_bad_text_is_named_and_ends_the_others(
    model: ServedModel, num_workers: int, error: ServiceError
) -> None:
    async with running_fleet(model, num_workers) as fleet:
        for worker in fleet.workers:
            worker.bad = {10 + 37: error}
        with pytest.raises(type(error), match=error.message) as caught:
            await fleet.pool(texts_of(50))
        assert caught.value.field == "input.37"
        await until(lambda: fleet.streams.num_active == 0)
        assert sum(len(worker.submits) for worker in fleet.workers) <= 50  # none was sent to a second worker


async def test_texts_of_a_worker_that_died_move_to_another_one(model: ServedModel) -> None:
    async with running_fleet(model, 2) as fleet:
        first, second = fleet.workers
        first.dies_in_queue = 3
        found = await fleet.pool(texts_of(3))
        assert [struct.unpack("<f", one.values)[0] for one in found] == [10, 11, 12]
        assert (len(first.submits), len(second.submits)) == (3, 3)
