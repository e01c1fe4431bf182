"""Worker services as processes for tests and benchmarks: started, killed, suspended, restarted at the same address."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from support.processes.service_process import STOP_SECONDS, ServiceProcess
from support.processes.worker_harness import Stream

from baton.rpc.channel import open_channel
from baton.v1 import control_pb2, control_pb2_grpc, types_pb2

_READY_SECONDS = 600.0  # a large model on a GPU may compile kernels first
_AUTOPSY_LINES = 400


@dataclass(eq=False)
class WorkerProcess(ServiceProcess):
    """A worker: its front and its engine."""

    name: str
    listen: str
    log_path: Path
    flags: Mapping[str, object]  # field of WorkerConfig: value
    environ: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def arguments(self) -> list[str]:
        flags = {"worker_id": self.name, "listen": self.listen, "log_format": "json", **self.flags}
        return ["worker", *(f"--{key.replace('_', '-')}={_shown(value)}" for key, value in flags.items())]

    def variables(self) -> dict[str, str]:
        return {"PYTHONFAULTHANDLER": "1", **self.environ}

    def wait_ready(self, seconds: float = _READY_SECONDS) -> None:
        asyncio.run(self.until_ready(seconds))

    async def until_ready(self, seconds: float = _READY_SECONDS) -> None:
        """Waits until the worker is ready. Fails with the log's end if it ends earlier or takes too long."""
        deadline = time.monotonic() + seconds
        while True:
            assert self.process is not None
            code = self.process.poll()
            assert code is None, f"{self.name} ended with {code}:\n{self.log_tail()}"
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self.stats(2.0)
                return
            assert time.monotonic() < deadline, f"{self.name} is not ready in {seconds:g} s:\n{self.log_tail()}"
            await asyncio.sleep(0.05)

    def kill(self) -> None:
        """Kills front and engine at once with SIGKILL."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(STOP_SECONDS)

    def autopsy(self) -> str:
        """Returns the log's end, with the stack of each thread if the worker still runs. Ends the worker."""
        assert self.process is not None
        code = self.process.poll()
        if code is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._ask_for_stacks(psutil.Process(self.process.pid))
        self.kill()
        return f"{'alive' if code is None else f'ended with {code}'}\n{self.log_tail(_AUTOPSY_LINES)}"

    def _ask_for_stacks(self, front: psutil.Process) -> None:
        front.suspend()  # so that it does not end with the engine before its own stacks are written
        for one in (*front.children(), front):
            one.send_signal(signal.SIGABRT)  # Python's fault handler writes the stacks
            one.resume()
            deadline = time.monotonic() + STOP_SECONDS
            while one.is_running() and one.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
                time.sleep(0.02)

    def stop(self) -> None:
        """Stops the worker and cleans up."""
        self.stop_by_force()
        self.process = None

    async def stats(self, timeout: float = 10.0) -> control_pb2.GetStatsResponse:
        """Audits the block pool. Returns the counters. Retries, because connecting may fail on a busy machine."""
        async with open_channel(self.listen) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            request = control_pb2.GetStatsRequest(audit=True)
            return await stub.GetStats(request, timeout=timeout, wait_for_ready=True)

    async def endpoint(self, address: str = "") -> types_pb2.Endpoint:
        """Returns its endpoint as in a placement. `address` is that of a proxy in front of it."""
        epoch = (await self.stats()).state.epoch
        return types_pb2.Endpoint(worker_id=self.name, epoch=epoch, address=address or self.listen)

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[Stream]:
        """Opens a gateway's stream."""
        async with open_channel(self.listen) as channel:
            stream = Stream(channel)
            try:
                yield stream
            finally:
                stream.call.cancel()

    async def until_idle(self, seconds: float) -> float:
        """Waits until no block is held or leased. Returns the seconds. Fails after a timeout."""
        began = time.monotonic()
        while True:
            stats = await self.stats()
            took = time.monotonic() - began
            assert stats.counters.transfers.num_stranded_blocks == 0, f"{self.name} has stranded blocks"
            if not stats.num_held_blocks and not stats.num_leased_blocks:
                return took
            assert took < seconds, (
                f"{self.name} holds {stats.num_held_blocks} and leases {stats.num_leased_blocks} blocks after "
                f"{took:.2f} s:\n{self.log_tail()}"
            )
            await asyncio.sleep(0.02)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
