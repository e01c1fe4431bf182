"""Generations on real workers with the simulated executor: the wire is the product's on both sides."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.gateway.scripted_services import ScriptedRouter, until
from support.processes import ports
from support.processes.worker_harness import running_worker

from baton.gateway.core import GenerationRequest
from baton.gateway.generation.generator import WorkerGenerator
from baton.gateway.generation.workers.stream_pool import WorkerStreams
from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.models.served import ModelCatalog, load_served_model
from baton.gateway.routers.client import RouterClient, RouterTimes
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

SAMPLE = str(Path(__file__).parents[3] / "models" / "storyteller-7m")
NAME = "storyteller-7m"
TIMES = RouterTimes(attempt=1.0, total=2.0, no_worker=0.2, first_delay=0.02, report_interval=0.01)


class CollectingSink:
    def __init__(self):
        self.writable = True
        self.token_ids = {}
        self.text = ""
        self.reasons = {}
        self.usage = None
        self.error = None
        self.ended = asyncio.Event()

    def on_delta(self, delta):
        self.token_ids.setdefault(delta.index, []).extend(delta.token_ids)
        self.text += delta.text
        if delta.finish_reason:
            self.reasons[delta.index] = delta.finish_reason

    def on_done(self, usage):
        self.usage = usage
        self.ended.set()

    def on_error(self, error):
        self.error = error
        self.ended.set()


class Placing:
    """A worker as the scripted router places on it."""

    def __init__(self, worker, worker_id):
        self.worker_id = worker_id
        self.endpoint = types_pb2.Endpoint(worker_id=worker_id, address=worker.address)


class Fleet:
    def __init__(self, workers, router, generator):
        self.workers = workers
        self.router = router
        self.generator = generator

    async def start(self, prompt=range(10, 110), max_tokens=50, n=1, **sampling):
        sink = CollectingSink()
        request = GenerationRequest(
            request_id="r1",
            model=NAME,
            prompt_token_ids=list(prompt),
            sampling=types_pb2.SamplingParams(seed=11, **sampling),
            stop=types_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
            n=n,
        )
        return await self.generator.start(request, sink), sink

    async def run(self, **fields):
        _, sink = await self.start(**fields)
        async with asyncio.timeout(20):
            await sink.ended.wait()
        return sink


@pytest.fixture
async def fleet():
    counters = GenerationCounters()
    catalog = ModelCatalog([load_served_model(SAMPLE)])
    async with AsyncExitStack() as stack:
        fields = {
            "model": SAMPLE, "served_model_name": NAME, "num_blocks": 2000, "max_model_len": 2048,
            "drain_timeout": 0.0,
            "sim_step_seconds": 0.002, "sim_slowness": 1.0,
        }  # fmt: skip
        workers = [
            await stack.enter_async_context(running_worker(port, worker_id=f"w{at}", **fields))
            for at, port in enumerate(ports.free_ports(2))
        ]
        placing = [Placing(worker, f"w{at}") for at, worker in enumerate(workers)]
        router = await stack.enter_async_context(ScriptedRouter(placing))
        router.models = [(await workers[0].state()).model]
        client = await stack.enter_async_context(RouterClient([router.address], catalog.update, counters, TIMES))
        streams = await stack.enter_async_context(WorkerStreams(counters))
        await until(lambda: catalog.ready)
        yield Fleet(workers, router, WorkerGenerator(catalog, client, streams, counters))


async def test_usage_has_the_workers_cached_tokens(fleet):
    first = await fleet.run()
    second = await fleet.run()
    assert first.token_ids == second.token_ids
    assert first.reasons == {0: "length"}
    assert (first.usage.prompt_tokens, first.usage.completion_tokens, first.usage.cached_tokens) == (100, 50, 0)
    assert second.usage.cached_tokens == 96


async def test_choices_differ_and_share_the_prompt(fleet):
    sink = await fleet.run(n=4)
    assert len({tuple(token_ids) for token_ids in sink.token_ids.values()}) == 4
    assert (sink.usage.prompt_tokens, sink.usage.completion_tokens) == (100, 200)


async def test_an_abort_gives_the_blocks_back(fleet):
    generation, sink = await fleet.start(max_tokens=1500, n=2)
    await until(lambda: sink.token_ids)
    generation.abort()
    await fleet.workers[0].until_idle(seconds=10)


async def test_logprobs_cross_the_wire(fleet):
    sink = await fleet.run(max_tokens=5, logprobs=2)
    assert sink.error is None
    assert len(sink.token_ids[0]) == 5


async def test_a_stopped_workers_requests_continue_elsewhere_unchanged(fleet):
    expected = await fleet.run(max_tokens=300, n=3)
    _, sink = await fleet.start(max_tokens=300, n=3)
    await until(lambda: len(sink.token_ids.get(2, ())) > 20)
    fleet.workers[0].stop.set()
    async with asyncio.timeout(20):
        await sink.ended.wait()
    assert sink.error is None
    assert len(fleet.router.places) > 2
    assert sink.token_ids == expected.token_ids
    assert sink.text
    assert sink.reasons == {0: "length", 1: "length", 2: "length"}


async def test_a_burst_is_served_whole(fleet):
    sinks = await asyncio.gather(*(fleet.run(prompt=range(10, 20 + at), max_tokens=30) for at in range(64)))
    assert all(sink.error is None and len(sink.token_ids[0]) == 30 for sink in sinks)


async def test_the_worker_takes_the_largest_prompt_and_the_gateway_refuses_the_next(fleet):
    sink = await fleet.run(prompt=[7] * 2047, max_tokens=50)
    assert len(sink.token_ids[0]) == 1
    with pytest.raises(InvalidRequest, match="maximum context length is 2048"):
        await fleet.start(prompt=[7] * 2048)
