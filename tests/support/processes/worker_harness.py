"""A worker service on loopback for tests, and a client of its streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from support.processes import ports

from baton.rpc.channel import open_channel
from baton.v1 import control_pb2, control_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from baton.worker import server
from baton.worker.config import WorkerConfig

NAMESPACE = bytes(16)


def sampling(**fields: Any) -> types_pb2.SamplingParams:
    """Returns resolved parameters, by default greedy."""
    neutral = {
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    return types_pb2.SamplingParams(**{**neutral, **fields})


def submit(slot: int, prompt: list[int], max_tokens: int = 8, **fields: Any) -> worker_pb2.SubmitRequest:
    """Returns a request with defaults for all other fields."""
    defaults = {
        "slot": slot,
        "request_id": f"r{slot}",
        "prompt_token_ids": prompt,
        "sampling": sampling(),
        "stop": types_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        "cache_namespace": NAMESPACE,
    }
    return worker_pb2.SubmitRequest(**{**defaults, **fields})


@dataclass
class Slot:
    """The responses for one slot."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[types_pb2.TokenLogprobs] = field(default_factory=list)
    pooled: np.ndarray | None = None  # [vectors, values]
    finish: worker_pb2.SlotFinish | None = None
    failure: worker_pb2.SlotFailure | None = None

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.failure is not None


class Stream:
    """A GenerateStream, with its responses by slot."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = worker_pb2_grpc.WorkerServiceStub(channel).GenerateStream()
        self.slots: dict[int, Slot] = defaultdict(Slot)
        self.num_frames = 0
        self._writing = asyncio.Lock()  # a call allows one write at a time

    async def send(self, *submits: worker_pb2.SubmitRequest, aborts: tuple[int, ...] = ()) -> None:
        for one in submits:
            self.slots.pop(one.slot, None)  # the slot is reused
        async with self._writing:
            await self.call.write(worker_pb2.GenerateStreamRequest(submits=submits, aborts=aborts))

    async def read(self) -> worker_pb2.GenerateStreamResponse:
        frame = await self.call.read()
        assert frame is not grpc.aio.EOF, f"the stream ended: {await self.call.code()} {await self.call.details()}"
        self.num_frames += 1
        tokens = iter(frame.token_ids)
        counts = frame.token_counts or [1] * len(frame.slots)
        for slot, count in zip(frame.slots, counts, strict=True):
            assert not self.slots[slot].ended, f"slot {slot} got tokens after its end"
            self.slots[slot].tokens += [next(tokens) for _ in range(count)]
        assert next(tokens, None) is None
        for record in frame.logprobs:
            self.slots[record.slot].logprobs += record.tokens
        for part in frame.pooled:
            self.slots[part.slot].pooled = np.frombuffer(part.values, "<f4").reshape(part.num_vectors, -1)
        for finish in frame.finishes:
            self.slots[finish.slot].finish = finish
        for failure in frame.failures:
            self.slots[failure.slot].failure = failure
        return frame

    async def until_ended(self, *slots: int, seconds: float = 20.0) -> list[Slot]:
        async with asyncio.timeout(seconds):
            while not all(self.slots[slot].ended for slot in slots):
                await self.read()
        return [self.slots[slot] for slot in slots]

    async def generate(self, *submits: worker_pb2.SubmitRequest) -> list[Slot]:
        await self.send(*submits)
        return await self.until_ended(*(one.slot for one in submits))


@dataclass
class Worker:
    """A running worker and a channel to it."""

    config: WorkerConfig
    stop: asyncio.Event
    serving: asyncio.Task[None]
    channel: grpc.aio.Channel

    @property
    def address(self) -> str:
        return self.config.listen

    def stream(self) -> Stream:
        return Stream(self.channel)

    @property
    def control(self) -> control_pb2_grpc.ControlServiceStub:
        return control_pb2_grpc.ControlServiceStub(self.channel)

    async def stats(self) -> control_pb2.GetStatsResponse:
        """Audits the block pool. Returns the counters."""
        return await self.control.GetStats(control_pb2.GetStatsRequest(audit=True), timeout=10)

    async def until_idle(self, seconds: float = 5.0) -> control_pb2.GetStatsResponse:
        """Waits until no block is held or leased. Returns the counters."""
        async with asyncio.timeout(seconds):
            while True:
                stats = await self.stats()
                if not stats.num_held_blocks and not stats.num_leased_blocks:
                    return stats
                await asyncio.sleep(0.02)

    async def state(self) -> worker_pb2.WorkerState:
        call = worker_pb2_grpc.WorkerServiceStub(self.channel).WatchState(worker_pb2.WatchStateRequest())
        response = await call.read()
        call.cancel()
        return response.state


@contextlib.asynccontextmanager
async def running_worker(port: int, **fields: Any) -> AsyncIterator[Worker]:
    """Yields a ready worker, by default with a fast simulator in a thread."""
    defaults = {"executor": "sim", "model": "none", "engine_process": False, "sim_slowness": 0.0, "drain_timeout": 5.0}
    config = WorkerConfig(**{**defaults, "listen": f"127.0.0.1:{port}", **fields})
    stop = asyncio.Event()
    serving = asyncio.create_task(server.serve(config, stop))
    channel = open_channel(config.listen)
    worker = Worker(config, stop, serving, channel)
    try:
        await _until_ready(worker)
        yield worker
    finally:
        stop.set()
        await channel.close()
        async with asyncio.timeout(20):
            await asyncio.gather(serving, return_exceptions=True)


async def _until_ready(worker: Worker, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            if worker.serving.done():
                await worker.serving
                raise AssertionError("the worker ended before it was ready")
            with contextlib.suppress(grpc.aio.AioRpcError):
                await worker.stats()
                return
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running_pair(**fields: object) -> AsyncIterator[tuple[Worker, Worker]]:
    """Yields a prefill worker and a decode worker."""
    first, second = ports.free_ports(2)
    async with (
        running_worker(first, role="prefill", worker_id="p", **fields) as prefill,
        running_worker(second, role="decode", worker_id="d", **fields) as decode,
    ):
        yield prefill, decode


def endpoint(worker: Worker) -> types_pb2.Endpoint:
    return types_pb2.Endpoint(worker_id=worker.config.worker_id, epoch=1, address=worker.address)
