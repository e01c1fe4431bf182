"""A silent worker is left after the timeout; a worker in a long computation is not."""

import asyncio

import pytest
from support.gateway.scripted_services import ScriptedWorker, until

from baton.gateway.generation.retry_budget import Loss, WorkerLost
from baton.gateway.generation.workers.stream import WorkerStream
from baton.gateway.generation.workers.stream_pool import WorkerStreams
from baton.gateway.metrics.counters import GenerationCounters
from baton.v1 import types_pb2, worker_pb2


class Receiver:
    def __init__(self):
        self.token_ids = []
        self.error = None
        self.ended = asyncio.Event()

    def on_tokens(self, token_ids, logprobs):
        self.token_ids.extend(token_ids)

    def on_finish(self, finish):
        self.ended.set()

    def on_failure(self, error):
        self.error = error
        self.ended.set()

    async def wait(self):
        async with asyncio.timeout(10):
            await self.ended.wait()


def submit(num_tokens=8):
    return worker_pb2.SubmitRequest(
        request_id="r", prompt_token_ids=[1, 2, 3], stop=types_pb2.StopConditions(max_tokens=num_tokens)
    )


@pytest.fixture
async def worker():
    async with ScriptedWorker("w1", lambda request: list(range(100, 100 + request.stop.max_tokens))) as worker:
        yield worker


async def test_a_worker_that_falls_silent_is_left(worker):
    counters = GenerationCounters()
    async with WorkerStreams(counters, silence_seconds=0.3) as streams:
        receiver = Receiver()
        streams.get(worker.endpoint).submit(submit(100_000), receiver)
        await until(lambda: receiver.token_ids)
        assert streams.avoided() == []
        worker.silent = True
        await receiver.wait()
        assert isinstance(receiver.error, WorkerLost)
        assert receiver.error.loss is Loss.GONE
        assert "the worker is silent" in receiver.error.message
        assert streams.avoided() == ["w1"]
        assert counters.silent_workers == 1


async def test_a_worker_without_any_frame_is_left(worker):
    worker.silent = True
    async with WorkerStreams(GenerationCounters(), silence_seconds=0.06) as streams:
        receiver = Receiver()
        streams.get(worker.endpoint).submit(submit(), receiver)
        await receiver.wait()
        assert "the worker is silent" in receiver.error.message


async def test_a_step_that_lasts_is_no_silence(worker):
    async with WorkerStreams(GenerationCounters(), silence_seconds=0.6) as streams:
        receiver = Receiver()
        stream = streams.get(worker.endpoint)
        stream.submit(submit(20), receiver)
        await until(lambda: receiver.token_ids)
        worker.steps_last = True
        await asyncio.sleep(1.5)
        assert receiver.error is None
        assert not stream.ended
        worker.steps_last = False
        await receiver.wait()
        assert receiver.error is None
        assert len(receiver.token_ids) == 20


async def test_without_a_bound_any_silence_is_fine(worker):
    async with WorkerStreams(GenerationCounters(), silence_seconds=0.0) as streams:
        receiver = Receiver()
        stream = streams.get(worker.endpoint)
        worker.silent = True
        stream.submit(submit(), receiver)
        await asyncio.sleep(0.5)
        assert not stream.ended


async def test_an_idle_stream_is_not_asked():
    stream = WorkerStream("w1", "127.0.0.1:1", lambda stream: None, GenerationCounters())
    for _ in range(100):
        stream.tick()
    assert not stream.is_silent
    await stream.close()
    assert not stream.is_silent


async def test_an_unreachable_worker_does_not_count_as_killed_by_a_request():
    async with WorkerStreams(GenerationCounters()) as streams:
        receiver = Receiver()
        streams.get(types_pb2.Endpoint(worker_id="gone", address="127.0.0.1:1")).submit(submit(), receiver)
        await receiver.wait()
        assert receiver.error.loss is Loss.GONE


async def test_a_worker_that_dies_with_a_request_died_of_it_perhaps(worker):
    async with WorkerStreams(GenerationCounters()) as streams:
        receiver = Receiver()
        worker.break_after_tokens = 3
        streams.get(worker.endpoint).submit(submit(), receiver)
        await receiver.wait()
        assert receiver.error.loss is Loss.DIED


async def begun(streams, endpoint):
    """Returns a stream with a first frame. Retries, because connecting may fail on a busy machine."""
    while True:
        receiver, stream = Receiver(), streams.get(endpoint)
        stream.submit(submit(100_000), receiver)
        await until(lambda receiver=receiver: receiver.token_ids or receiver.ended.is_set(), 20.0)
        if receiver.token_ids:
            return stream


@pytest.mark.parametrize("epochs", [(1, 1), (1, 2)])
async def test_a_worker_that_was_left_and_lived_is_given_twice_the_time(worker, epochs):
    async with WorkerStreams(GenerationCounters(), silence_seconds=0) as streams:
        for epoch in epochs:
            endpoint = types_pb2.Endpoint(worker_id="w1", address=worker.endpoint.address, epoch=epoch)
            stream = await begun(streams, endpoint)
            for _ in range(5):
                stream.tick()
            assert not stream.ended
            stream.tick()
            if stream.ended:
                await stream.close()
        assert stream.ended == (epochs == (1, 2)), "the second time it has twice as long, unless it is another life"
        for _ in range(6):
            stream.tick()
        assert stream.is_silent
