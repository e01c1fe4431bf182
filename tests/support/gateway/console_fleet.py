"""A hundred scripted workers, a router that watches them, and placed requests, as a load for consoles."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
from support.fleet.fleet_node import ScriptedWorker, state
from support.processes import ports, stack
from support.processes.stack import Service

from baton.rpc.channel import open_channel
from baton.services.up import tandem
from baton.v1 import router_pb2, router_pb2_grpc, types_pb2, worker_pb2

MODEL = "storyteller-7m"
_NUM_SENDERS = 8  # prefill workers that have sent KV to each decode worker
_READY_SECONDS = 60.0


class ConsoleFleet:
    """Half of the workers prefill, half decode; one in twenty drains. Runs while entered."""

    def __init__(
        self, num_workers: int, placements_per_second: float, seed: int, states_per_second: float = 2.0
    ) -> None:
        self._draw = random.Random(seed)
        self._interval = 1 / states_per_second
        self._placement_interval = 1 / placements_per_second
        half = num_workers // 2
        roles = [types_pb2.WORKER_ROLE_PREFILL] * half + [types_pb2.WORKER_ROLE_DECODE] * (num_workers - half)
        self.prefills = [f"prefill-{at}" for at in range(half)]
        names = [*self.prefills, *(f"decode-{at}" for at in range(num_workers - half))]
        self.workers = [ScriptedWorker(_state(name, role)) for name, role in zip(names, roles, strict=True)]
        self.router = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> ConsoleFleet:
        for at, worker in enumerate(self.workers):
            worker.state.draining = at % 20 == 19
            await worker.start()
        self.router = f"127.0.0.1:{ports.free_ports(1)[0]}"
        addresses = ",".join(worker.address for worker in self.workers)
        flags = ("--listen", self.router, "--metrics-listen", "127.0.0.1:0", "--workers", addresses, "--kvstore", "")
        command = [sys.executable, "-m", "baton.services.cli", "router", *flags]
        nowhere = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)  # noqa: ASYNC220
        self._tasks.append(asyncio.create_task(self._work()))
        await self._until_alive()
        self._tasks.append(asyncio.create_task(self._place()))
        return self

    async def __aexit__(self, *exception: Any) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    async def _until_alive(self) -> None:
        async with asyncio.timeout(_READY_SECONDS), open_channel(self.router) as channel:
            stub: Any = router_pb2_grpc.RouterServiceStub(channel)
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=5)
                    if sum(entry.alive for entry in answer.workers) == len(self.workers):
                        return
                await asyncio.sleep(0.2)

    async def _work(self) -> None:
        """Changes all figures, as under load."""
        while True:
            for worker in self.workers:
                self._step(worker)
                worker.publish()
                await asyncio.sleep(self._interval / len(self.workers))

    def _step(self, worker: ScriptedWorker) -> None:
        draw, told = self._draw, worker.state
        decodes = told.role == types_pb2.WORKER_ROLE_DECODE
        told.load.num_running = draw.randint(8, 48) if decodes else draw.randint(0, 4)
        told.load.queue_depth = draw.choice((0, 0, 0, 1, 3))
        told.load.num_free_blocks = round(told.load.num_blocks * draw.uniform(0.2, 0.8))
        seconds = self._interval
        prompt = round(draw.uniform(2000, 6000) * seconds)
        told.totals.num_prompt_tokens += prompt
        told.totals.num_cached_tokens += round(prompt * draw.uniform(0.2, 0.7))
        if decodes:
            told.totals.num_output_tokens += round(draw.uniform(600, 1200) * seconds)
            for flow in told.flows:
                flow.num_transfers += 1
                flow.num_bytes += round(draw.uniform(0.2e9, 1.5e9) * seconds)

    async def _place(self) -> None:
        async with open_channel(self.router) as channel:
            stub: Any = router_pb2_grpc.RouterServiceStub(channel)
            number = 0
            while True:
                number += 1
                request = router_pb2.PlaceRequest(
                    request_id=f"req-{number:08d}",
                    model=MODEL,
                    num_prompt_tokens=self._draw.randint(50, 1500),
                    max_tokens=256,
                )
                with contextlib.suppress(grpc.aio.AioRpcError):
                    placed = await stub.Place(request, timeout=5)
                    outcome = self._outcome(placed)
                    await stub.Report(router_pb2.ReportRequest(outcomes=[outcome]), timeout=5)
                await asyncio.sleep(self._placement_interval)

    def _outcome(self, placed: router_pb2.PlaceResponse) -> router_pb2.PlacementOutcome:
        draw = self._draw
        queue, prefill, itl, tokens = draw.expovariate(100), draw.uniform(0.02, 0.2), draw.uniform(0.01, 0.04), 200
        moved = placed.HasField("prefill")
        times = router_pb2.RequestTimes(
            place_us=600, queue_us=round(queue * 1e6), prefill_us=round(prefill * 1e6), mean_itl_us=round(itl * 1e6),
            decode_us=round(itl * (tokens - 1) * 1e6), transfer_us=round(prefill * 0.9e6) * moved,
            num_transfer_bytes=80_000_000 * moved,
        )  # fmt: skip
        return router_pb2.PlacementOutcome(
            placement_id=placed.placement_id, num_cached_tokens=64, num_output_tokens=tokens,
            first_token_us=round((queue + prefill) * 1e6), times=times,
        )  # fmt: skip


def _state(name: str, role: types_pb2.WorkerRole.ValueType) -> worker_pb2.WorkerState:
    told = state(name, role, name=MODEL, max_num_requests=64)
    told.model.vocab_size, told.model.max_model_len = 4096, 2048
    number = int(name.rpartition("-")[2])
    if role == types_pb2.WORKER_ROLE_DECODE:
        told.flows.extend(
            worker_pb2.KvFlow(sender_worker_id=f"prefill-{number // 10 * 10 + at}") for at in range(_NUM_SENDERS)
        )
    return told


@contextlib.asynccontextmanager
async def console_fleet(
    num_workers: int = 100, placements_per_second: float = 50.0, seed: int = 1
) -> AsyncIterator[str]:
    """Yields the address of the fleet's router."""
    async with ConsoleFleet(num_workers, placements_per_second, seed) as fleet:
        yield fleet.router


def run_fleet(cleanup: ExitStack, num_workers: int, placements_per_second: float) -> str:
    """Runs a fleet in a thread. Returns its router's address."""
    fleet = ConsoleFleet(num_workers, placements_per_second, seed=1)
    is_up, stopped = threading.Event(), threading.Event()

    async def run() -> None:
        async with fleet:
            is_up.set()
            while not stopped.is_set():  # noqa: ASYNC110 - another thread sets it
                await asyncio.sleep(0.05)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    cleanup.callback(thread.join)
    cleanup.callback(stopped.set)
    assert is_up.wait(90)
    return fleet.router


def start_gateway(log: Path, router: str, flags: tuple[str, ...], cleanup: ExitStack) -> str:
    """Starts `baton gateway` on a router. Returns its URL."""
    rest, rpc = (f"127.0.0.1:{port}" for port in ports.free_ports(2))
    service = gateway_service(log, rest, rpc, router, flags)
    cleanup.callback(service.stop_by_force)
    service.start()
    return f"http://{rest}"


def gateway_service(log: Path, rest: str, rpc: str, router: str, flags: tuple[str, ...]) -> Service:
    """Returns `baton gateway`, not started."""
    listen = ("--rest-listen", rest, "--grpc-listen", rpc, "--router", router, "--model", str(stack.MODEL))
    plan = tandem.ServicePlan(
        name="gateway", command="gateway", flags=(*listen, *flags), secrets={}, address=rpc, metrics=rest,
        probe=tandem.Probe.HTTP_READY, probe_address=rest, stop_stage=0,
    )  # fmt: skip
    return Service(plan, log)
