"""A request whose prefill worker dies counts that as a death: with the next one it is taken for the cause."""

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest
from support.gateway.rest_harness import SAMPLE
from support.gateway.scripted_services import ScriptedRouter, until
from support.processes import ports
from support.processes.worker_processes import WorkerProcess

from baton.gateway.core import GenerationRequest
from baton.gateway.generation.generator import WorkerGenerator
from baton.gateway.generation.retry_budget import LET_OFF_TOKENS, PoisonousRequest
from baton.gateway.generation.workers.stream_pool import WorkerStreams
from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.models.served import ModelCatalog, load_served_model
from baton.gateway.routers.client import RouterClient
from baton.v1 import types_pb2

NAMES = ("p", "d0", "d1")
TOKEN_SECONDS = 0.005  # of a prompt; it is computed in steps of 32
LONG = 1600  # eight seconds
NUM_TOKENS = 60


class Ended:
    writable = True

    def __init__(self):
        self.error = None
        self.num_tokens = 0
        self.event = asyncio.Event()

    def on_delta(self, delta):
        self.num_tokens += len(delta.token_ids)

    def on_done(self, usage):
        self.event.set()

    def on_error(self, error):
        self.error = error
        self.event.set()


@pytest.fixture
async def site(tmp_path):
    """A gateway's inner side over a prefill worker and two decode workers, of which the first is placed on."""
    workers = {}
    async with AsyncExitStack() as cleanup:
        for name, port in zip(NAMES, ports.free_ports(len(NAMES)), strict=True):
            flags = {
                "role": "prefill" if name == "p" else "decode",
                "executor": "sim",
                "model": SAMPLE,
                "drain_timeout": 0,
                "sim_prefill_token_seconds": TOKEN_SECONDS,
                "sim_step_seconds": 0.02,
                "max_num_requests": 8,
                "max_num_batched_tokens": 32,
                "transports": "tcp",
            }
            workers[name] = WorkerProcess(name, f"127.0.0.1:{port}", tmp_path / f"{name}.log", flags)
            workers[name].spawn()
            cleanup.callback(workers[name].stop)
        await asyncio.gather(*(worker.until_ready(60) for worker in workers.values()))
        ends = {name: await worker.endpoint() for name, worker in workers.items()}
        places = [SimpleNamespace(worker_id=name, endpoint=ends[name]) for name in NAMES[1:]]
        router = await cleanup.enter_async_context(ScriptedRouter(places))
        router.models = [(await workers["d0"].stats()).state.model]
        router.prefills = [ends["p"]]
        counters = GenerationCounters()
        model = load_served_model(str(SAMPLE))
        catalog = ModelCatalog([model])
        client = RouterClient([router.address], catalog.update, counters)
        await cleanup.enter_async_context(client)
        streams = await cleanup.enter_async_context(WorkerStreams(counters))
        await until(lambda: model.info is not None)
        yield SimpleNamespace(
            workers=workers,
            router=router,
            counters=counters,
            generator=WorkerGenerator(catalog, client, streams, counters),
        )


async def ask(site, num_prompt_tokens=400):
    """Starts a request. Returns when the decode worker knows that the prefill worker has begun its prompt."""
    sink = Ended()
    prompt = list(range(10, 10 + num_prompt_tokens))
    stop = types_pb2.StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True)
    await site.generator.start(GenerationRequest("r1", site.router.models[0].name, prompt, stop=stop), sink)
    await until_stats(site.workers["d0"], lambda stats: stats.num_leased_blocks)
    return sink


async def until_stats(worker, is_so):
    for _ in range(1000):
        if is_so(await worker.stats()):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(worker.log_tail())


def computes(stats):
    return stats.num_held_blocks and not stats.num_leased_blocks


async def test_a_prefill_worker_and_then_a_decode_worker_are_the_last_that_a_request_ends(site):
    sink = await ask(site, LONG)
    site.workers["p"].kill()
    await until_stats(site.workers["d0"], computes)
    site.workers["d0"].kill()
    async with asyncio.timeout(20):
        await sink.event.wait()
    assert isinstance(sink.error, PoisonousRequest), sink.error
    assert "p after 0 tokens" in sink.error.message
    assert "d0 after 0 tokens" in sink.error.message
    assert site.counters.poisonous_requests == 1
    assert (await site.workers["d1"].stats()).counters.num_prompt_tokens == 0
    assert len(site.router.places) == 1


async def test_a_request_that_lost_only_its_prefill_worker_is_answered(site):
    sink = await ask(site)
    site.workers["p"].kill()
    async with asyncio.timeout(30):
        await sink.event.wait()
    assert sink.error is None
    assert sink.num_tokens == NUM_TOKENS
    assert site.counters.poisonous_requests == 0


async def test_a_request_that_ran_on_after_losing_its_prefill_worker_is_not_blamed(site):
    sink = await ask(site)
    site.workers["p"].kill()
    await until(lambda: sink.num_tokens > LET_OFF_TOKENS, 30)
    site.workers["d0"].kill()
    async with asyncio.timeout(30):
        await sink.event.wait()
    assert sink.error is None
    assert sink.num_tokens == NUM_TOKENS
