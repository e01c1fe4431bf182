"""Helpers of gateway benchmarks: a worker with steps at exact times, processes, and their CPU."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil
from support.processes.ports import free_ports

from baton.rpc.server.server import RpcServer, Service
from baton.services.bench.datasets.source import BenchFailed
from baton.services.bench.serve.http_stream import HttpPool
from baton.v1 import types_pb2, worker_pb2, worker_pb2_grpc

SAMPLE = Path(__file__).parents[3] / "models" / "storyteller-7m"
_READY_SECONDS = 120.0


class PacedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Sends every running request a token at each step. Results identify a request by its seed."""

    worker_id = "paced"

    def __init__(self, token_ids: Sequence[int], step_seconds: float) -> None:
        self._token_ids = token_ids
        self._step_seconds = step_seconds
        self._running: dict[int, int] = {}  # slot: the step of its last token
        self._ending: dict[int, list[int]] = defaultdict(list)  # by step
        self._aborted: list[int] = []
        self._ping = 0  # not answered yet; 0: none
        self._news = asyncio.Event()
        self._server = RpcServer("127.0.0.1:0", [], 0)
        self.first_steps: dict[int, int] = {}  # by seed
        self.sent_at: list[float] = []  # perf_counter of each step

    async def __aenter__(self) -> Self:
        register = worker_pb2_grpc.add_WorkerServiceServicer_to_server
        self._server = RpcServer("127.0.0.1:0", [Service("baton.v1.WorkerService", self, register)], grace_seconds=0)
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._server.__aexit__(None, None, None)

    @property
    def endpoint(self) -> types_pb2.Endpoint:
        return types_pb2.Endpoint(worker_id=self.worker_id, epoch=1, address=f"127.0.0.1:{self._server.port}")

    async def GenerateStream(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        reading = asyncio.create_task(self._read(request_iterator))
        due = time.perf_counter()
        try:
            while True:
                if not self._running and not self._aborted and not self._ping:
                    self._news.clear()
                    await self._news.wait()
                # After a late step, the next ones are not rushed.
                due = max(due + self._step_seconds, time.perf_counter())
                await asyncio.sleep(due - time.perf_counter())
                frame = self._step()
                self.sent_at.append(time.perf_counter())
                yield frame
        finally:
            reading.cancel()

    async def _read(self, messages: Any) -> None:
        async for message in messages:
            self._ping = message.ping or self._ping
            for slot in message.aborts:
                if self._running.pop(slot, None) is not None:
                    self._aborted.append(slot)
            for submit in message.submits:
                first = len(self.sent_at)
                last = first + submit.stop.max_tokens - 1
                self.first_steps[submit.sampling.seed] = first
                self._running[submit.slot] = last
                self._ending[last].append(submit.slot)
            self._news.set()

    def _step(self) -> worker_pb2.GenerateStreamResponse:
        number = len(self.sent_at)
        slots = list(self._running)
        token_id = self._token_ids[number % len(self._token_ids)]
        frame = worker_pb2.GenerateStreamResponse(step=number, slots=slots, token_ids=[token_id] * len(slots))
        for slot in self._ending.pop(number, ()):
            if self._running.get(slot) == number:
                del self._running[slot]
                frame.finishes.add(slot=slot, reason=types_pb2.FINISH_REASON_LENGTH)
        for slot in self._aborted:
            frame.finishes.add(slot=slot, reason=types_pb2.FINISH_REASON_ABORT)
        self._aborted.clear()
        frame.pong, self._ping = self._ping, 0
        return frame


class Server:
    """A process that serves HTTP on `port`, with its children."""

    def __init__(self, name: str, port: int, pid: int) -> None:
        self.name = name
        self.port = port
        self.pid = pid
        self._process = psutil.Process(pid)

    def cpu_seconds(self) -> float:
        """Returns the user and system time of all its processes so far."""
        return sum(cpu_seconds(one) for one in (self._process, *self._process.children(recursive=True)))

    def resident_bytes(self) -> int:
        """Returns the resident memory of all its processes."""
        processes = (self._process, *self._process.children(recursive=True))
        return int(sum(one.memory_info().rss for one in processes))


def cpu_seconds(process: psutil.Process) -> float:
    """Returns the user and system time of one process."""
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.asynccontextmanager
async def gateway(router: str, name: str = "baton", served: str = SAMPLE.name) -> AsyncIterator[Server]:
    """Runs `baton gateway` with a router, for a model under the name `served`. Its log is written to /dev/null."""
    rest, grpc = free_ports(2)
    flags = {
        "rest-listen": f"127.0.0.1:{rest}",
        "grpc-listen": f"127.0.0.1:{grpc}",
        "router": router,
        "served-model-name": served,
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    command = (sys.executable, "-m", "baton.services.cli", "gateway", *words, "--model", str(SAMPLE))
    async with started(name, command, rest, "/ready") as server:
        yield server


@contextlib.asynccontextmanager
async def started(
    name: str, command: Sequence[str], port: int, probe: str, environ: Mapping[str, str] | None = None
) -> AsyncIterator[Server]:
    """Starts a process. Waits until GET `probe` responds with 200. Raises BenchFailed."""
    nowhere = asyncio.subprocess.DEVNULL
    child = await asyncio.create_subprocess_exec(*command, stdout=nowhere, stderr=nowhere, env=environ)
    try:
        await _until_ready(name, child, port, probe)
        yield Server(name, port, child.pid)
    finally:
        _kill_tree(child.pid)
        await child.wait()


def _kill_tree(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (*root.children(recursive=True), root):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


async def _until_ready(name: str, child: asyncio.subprocess.Process, port: int, probe: str) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline and child.returncode is None:
        pool = HttpPool(f"http://127.0.0.1:{port}", {})
        with contextlib.suppress(OSError, TimeoutError):
            status, _ = await pool.fetch("GET", probe, timeout=2.0)
            if status == 200:
                pool.close()
                return
        await asyncio.sleep(0.2)
    ended = f"it ended with {child.returncode}" if child.returncode is not None else f"not in {_READY_SECONDS:.0f} s"
    raise BenchFailed(f"{name} did not answer {probe} on port {port}: {ended}")
