"""Compares one prefill and one decode worker with one worker that does both, under the same load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.processes import ports
from support.processes.worker_harness import Stream, submit
from support.processes.worker_processes import WorkerProcess

from baton.rpc.channel import open_channel
from baton.v1 import worker_pb2

WAIT_SECONDS = 600.0
_NEIGHBOUR_PROMPT_TOKENS = 64
_FOREVER = 1 << 20  # output tokens


class TimedStream(Stream):
    """A stream that records the arrival of each token. Slots are not reused."""

    reading: asyncio.Task[None]  # to the stream's end

    def __init__(self, channel: Any) -> None:
        super().__init__(channel)
        self.arrivals: dict[int, list[float]] = defaultdict(list)

    async def read(self) -> worker_pb2.GenerateStreamResponse:
        frame = await super().read()
        now = time.monotonic()
        counts = frame.token_counts or [1] * len(frame.slots)
        for slot, count in zip(frame.slots, counts, strict=True):
            self.arrivals[slot] += [now] * count
        return frame


@dataclass(frozen=True)
class Answer:
    """The times of one request, in seconds of the monotonic clock."""

    request_id: str
    sent_at: float
    arrivals: list[float]  # of its tokens

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent_at


@dataclass
class Load:
    """The measurements of a window of load."""

    seconds: float
    answers: list[Answer]
    neighbour_gaps: list[float] = field(default_factory=list)  # between tokens of concurrent requests that only decode
    num_neighbour_tokens: int = 0


class Deployment:
    """Serving workers. Requests go to `entry`."""

    def __init__(self, entry: WorkerProcess, prefill: WorkerProcess | None, vocab_size: int, seed: int) -> None:
        self.entry = entry
        self.prefill = prefill
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self._slots = itertools.count()

    @property
    def workers(self) -> list[WorkerProcess]:
        return [self.entry, *([self.prefill] if self.prefill else [])]

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[TimedStream]:
        """Opens a gateway's stream."""
        async with open_channel(self.entry.listen) as channel:
            stream = TimedStream(channel)
            stream.reading = asyncio.create_task(_read_on(stream))
            try:
                yield stream
            finally:
                stream.reading.cancel()
                stream.call.cancel()

    async def window(
        self, stream: TimedStream, num_tokens: int, count: int, concurrency: int, max_tokens: int, neighbours: int = 0
    ) -> Load:
        """Sends `count` prompts, `concurrency` at a time, while `neighbours` other requests decode."""
        limit = asyncio.Semaphore(concurrency)

        async def ask() -> Answer:
            async with limit:
                return await self._ask(stream, num_tokens, max_tokens)

        beside = [self._neighbour() for _ in range(neighbours)]
        await self._start(stream, beside)
        began = time.monotonic()
        answers = list(await asyncio.gather(*(ask() for _ in range(count))))
        ended = time.monotonic()
        gaps, num_beside = _gaps(stream, beside, began, ended)
        await self._leave(stream, beside)
        return Load(ended - began, answers, gaps, num_beside)

    async def rest(self, stream: TimedStream, seconds: float, neighbours: int, prompts: Sequence[int] = ()) -> Load:
        """Measures neighbours while requests with prompts of these lengths, whose KV is computed, decode too."""
        beside = [self._neighbour() for _ in range(neighbours)]
        along = [await self._submit(num_tokens, _FOREVER) for num_tokens in prompts]
        await self._start(stream, [*along, *beside])
        began = time.monotonic()
        await asyncio.sleep(seconds)
        ended = time.monotonic()
        gaps, num_beside = _gaps(stream, beside, began, ended)
        await self._leave(stream, [*along, *beside])
        return Load(seconds, [], gaps, num_beside)

    def records(self) -> dict[str, dict[str, float]]:
        """Returns both workers' log entries of each hand-over, merged, by request id."""
        merged: dict[str, dict[str, float]] = defaultdict(dict)
        for worker in self.workers:
            for line in worker.log_path.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    entry = json.loads(line)
                    if isinstance(entry, dict) and entry.get("message") in ("KV received", "KV sent"):
                        side = "received" if entry["message"] == "KV received" else "sent"
                        merged[entry["request_id"]] |= {f"{side}_{key}": value for key, value in entry.items()}
        return merged

    async def _ask(self, stream: TimedStream, num_tokens: int, max_tokens: int) -> Answer:
        one = await self._submit(num_tokens, max_tokens)
        sent_at = time.monotonic()
        await stream.send(one)
        await _until(stream, lambda: stream.slots[one.slot].ended)
        assert stream.slots[one.slot].failure is None, stream.slots[one.slot].failure
        return Answer(one.request_id, sent_at, stream.arrivals[one.slot])

    async def _submit(self, num_tokens: int, max_tokens: int) -> worker_pb2.SubmitRequest:
        """Returns a request, for the prefill worker if there is one."""
        one = submit(next(self._slots), self._prompt(num_tokens), max_tokens)
        if self.prefill is not None:
            one.prefill.CopyFrom(await self.prefill.endpoint())
        return one

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(5, self._vocab_size) for _ in range(num_tokens)]

    def _neighbour(self) -> worker_pb2.SubmitRequest:
        return submit(next(self._slots), self._prompt(_NEIGHBOUR_PROMPT_TOKENS), _FOREVER)

    async def _start(self, stream: TimedStream, beside: list[worker_pb2.SubmitRequest]) -> None:
        if beside:
            await stream.send(*beside)
            await _until(stream, lambda: all(len(stream.arrivals[one.slot]) > 4 for one in beside))

    async def _leave(self, stream: TimedStream, beside: list[worker_pb2.SubmitRequest]) -> None:
        if beside:
            await stream.send(aborts=tuple(one.slot for one in beside))
            await _until(stream, lambda: all(stream.slots[one.slot].ended for one in beside))


@contextlib.contextmanager
def deployment(
    folder: Path, disaggregated: bool, flags: Mapping[str, object], devices: tuple[str, ...], vocab_size: int, seed: int
) -> Iterator[Deployment]:
    """Starts a deployment. `devices` are for CUDA_VISIBLE_DEVICES, the prefill worker's first; empty: unchanged."""
    roles = ("prefill", "decode") if disaggregated else ("both",)
    with ExitStack() as cleanup:
        workers = []
        for index, (role, port) in enumerate(zip(roles, ports.free_ports(len(roles)), strict=True)):
            environ = {"CUDA_VISIBLE_DEVICES": devices[index % len(devices)]} if devices else {}
            log_path = folder / f"{role}-{os.getpid()}-{port}.log"
            worker = WorkerProcess(role, f"127.0.0.1:{port}", log_path, {"role": role, **flags}, environ)
            cleanup.callback(worker.stop)
            worker.spawn()
            workers.append(worker)
        for worker in workers:
            worker.wait_ready()
        yield Deployment(workers[-1], workers[0] if disaggregated else None, vocab_size, seed)


async def _read_on(stream: Stream) -> None:
    while True:
        await stream.read()


async def _until(stream: TimedStream, done: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not done():
            if stream.reading.done():
                stream.reading.result()
            await asyncio.sleep(0.001)


def _gaps(
    stream: TimedStream, beside: list[worker_pb2.SubmitRequest], began: float, ended: float
) -> tuple[list[float], int]:
    gaps: list[float] = []
    count = 0
    for one in beside:
        inside = [at for at in stream.arrivals[one.slot] if began <= at <= ended]
        gaps += [later - earlier for earlier, later in itertools.pairwise(inside)]
        count += len(inside)
    return gaps, count
