"""Real services as processes for tests: started as the tandem plans them, killed, restarted, and cleaned up."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import grpc
import psutil
from support.processes import ports
from support.processes.service_process import ROOT, STOP_SECONDS, ServiceProcess
from support.redis.program import redis_program

from baton.rpc.channel import Dial
from baton.services.machine.devices import Devices
from baton.services.up import tandem
from baton.services.up.config import UpConfig
from baton.services.up.layout import choose_layout
from baton.services.up.readiness import is_ready
from baton.v1 import control_pb2, control_pb2_grpc

MODEL = ROOT / "models" / "storyteller-7m"
MODEL_NAME = "storyteller-7m"

READY_SECONDS = 60.0


def wait_until(condition: Any, what: str, seconds: float = 10.0, interval: float = 0.05) -> Any:
    """Polls `condition` and returns its first truthy result. Fails with `what` after a timeout."""
    deadline = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what} (last answer: {answer!r})")
        time.sleep(interval)


@dataclass
class RedisServer:
    """A Redis server on its own port, which tests may stop and start."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        flags = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", "")
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen([redis_program(), *flags], stdout=log, stderr=log)
        wait_until(self._answers, "redis answers")

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(STOP_SECONDS)
            self.process = None

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), contextlib.closing(http.client.socket.socket()) as probe:  # type: ignore[attr-defined]
            probe.connect(("127.0.0.1", self.port))
            probe.sendall(b"PING\r\n")
            return probe.recv(16).startswith(b"+PONG")
        return False


@dataclass
class Service(ServiceProcess):
    """The process of a service."""

    plan: tandem.ServicePlan
    log_path: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    tls: tandem.TlsPlan = field(default_factory=tandem.TlsPlan)

    def arguments(self) -> tuple[str, ...]:
        return self.plan.arguments

    def variables(self) -> dict[str, str]:
        return {**self.plan.variables, **self.plan.secrets, **self.environ}

    def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        wait_until(self._ready, f"{self.plan.name} ready; its log:\n{self.log_tail()}", seconds)

    def start(self) -> None:
        self.spawn()
        self.wait_ready()

    def kill(self) -> None:
        """Kills the service's main process with SIGKILL, but not its children."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(STOP_SECONDS)

    def stop(self) -> int:
        """Sends SIGTERM. Returns the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(STOP_SECONDS)

    def _ready(self) -> bool:
        assert self.process is not None
        code = self.process.poll()
        assert code is None, f"{self.plan.name} ended with {code}; its log:\n{self.log_tail()}"
        dial = Dial(self.tls.probing, self.plan.command)
        return run_async(is_ready(self.plan.probe, self.plan.probe_address, dial, self.tls.edge_ca))


def run_async(coroutine: Any) -> Any:
    """Runs a coroutine in a new event loop; in another thread if a loop already runs in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def planned_services(config: UpConfig, model: str) -> list[tandem.ServicePlan]:
    """Returns the services of a tandem on this machine's cores."""
    layout = choose_layout(config.executor, config.counts, Devices())
    return tandem.plan(config, layout, model, len(os.sched_getaffinity(0)), ports.free_ports)


@dataclass
class Stack:
    """A tandem of real services."""

    config: UpConfig
    services: dict[str, Service]

    @classmethod
    def planned(
        cls, folder: Path, config: UpConfig, environ: Mapping[str, str], extra: Mapping[str, tuple[str, ...]]
    ) -> Stack:
        """Returns the stack that the tandem plans, with `extra` flags by command or name."""
        folder.mkdir(parents=True, exist_ok=True)
        config = tandem.check_listen_addresses(config, ports.free_ports)
        tls = tandem.plan_tls(config)
        services = {}
        for plan in planned_services(config, config.model):
            flags = (*plan.flags, *extra.get(plan.command, ()), *extra.get(plan.name, ()))
            name = plan.name.replace(" ", "-")
            services[name] = Service(replace(plan, flags=flags), folder / f"{name}.log", environ, tls=tls)
        return cls(config, services)

    def start(self) -> None:
        _RUNNING.append(self)
        for service in reversed(self.services.values()):
            service.spawn()
        for service in reversed(self.services.values()):
            service.wait_ready()

    def stop(self) -> None:
        for service in self.services.values():
            service.stop_by_force()
        _RUNNING.remove(self)

    def __getitem__(self, name: str) -> Service:
        return self.services[name]

    @property
    def rest(self) -> str:
        return self.config.rest_listen

    @property
    def url(self) -> str:
        return f"http://{self.config.rest_listen}"

    @property
    def workers(self) -> list[Service]:
        return [service for name, service in self.services.items() if name.startswith("worker")]

    def post(self, path: str, body: Any, timeout: float = 60.0) -> tuple[int, Any]:
        """Sends a POST with a JSON body or bytes. Returns the status and the parsed JSON, or the text."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, data, timeout)

    def get(self, path: str, timeout: float = 10.0) -> tuple[int, Any]:
        return self.request("GET", path, None, timeout)

    def request(self, method: str, path: str, data: bytes | None, timeout: float) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.rest, timeout=timeout)
        try:
            connection.request(method, path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
            is_json = "json" in (response.getheader("content-type") or "")
            return response.status, json.loads(text) if is_json else text
        finally:
            connection.close()

    def chat(self, content: str, **fields: Any) -> dict[str, Any]:
        """Returns the body of a successful chat completion."""
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], **fields}
        status, answer = self.post("/v1/chat/completions", body)
        assert status == 200, (status, answer)
        assert isinstance(answer, dict)
        return answer

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the chunks of a streamed answer, up to [DONE]."""
        connection = http.client.HTTPConnection(self.rest, timeout=60)
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}).encode())
            response = connection.getresponse()
            assert response.status == 200, (response.status, response.read())
            for line in response:
                if line.startswith(b"data: "):
                    data = line.removeprefix(b"data: ").strip()
                    if data == b"[DONE]":
                        return
                    yield json.loads(data)
            raise AssertionError("the stream ended without [DONE]")
        finally:
            connection.close()

    def stats(self, service: Service) -> control_pb2.GetStatsResponse:
        """Audits a worker's block pool. Returns its counters."""
        with grpc.insecure_channel(service.plan.address) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            return stub.GetStats(control_pb2.GetStatsRequest(audit=True), timeout=10)

    def wait_all_blocks_back(self, seconds: float = 10.0) -> None:
        """Waits until no worker holds or leases a block. Fails after the time."""
        for worker in self.workers:
            wait_until(lambda worker=worker: self._is_idle(worker), f"{worker.plan.name} has its blocks back", seconds)

    def _is_idle(self, worker: Service) -> bool:
        stats = self.stats(worker)
        total = stats.num_held_blocks + stats.num_leased_blocks + stats.num_cached_blocks + stats.num_empty_blocks
        assert total == stats.state.load.num_blocks, stats
        return stats.num_held_blocks == 0 and stats.num_leased_blocks == 0


_RUNNING: list[Stack] = []


def running() -> list[Stack]:
    """Returns all running stacks."""
    return list(_RUNNING)


def start_stack(
    folder: Path,
    cleanup: ExitStack,
    extra: Mapping[str, tuple[str, ...]] | None = None,
    environ: Mapping[str, str] | None = None,
    **config: Any,
) -> Stack:
    """Starts a tandem with these fields of UpConfig, and `extra` flags by command or service name."""
    defaults = {"model": str(MODEL), "served_model_name": (MODEL_NAME,)}
    listen = {"rest_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0"}
    settings = UpConfig(**{**defaults, **listen, **config})
    stack = Stack.planned(Path(mkdtemp(dir=folder)), settings, environ or {}, extra or {})
    cleanup.callback(stack.stop)
    stack.start()
    return stack


def metric(text: str, name: str, **labels: str) -> float:
    """Returns the sum of a metric's samples with these labels."""
    total = 0.0
    for line in text.splitlines():
        match = re.fullmatch(rf"{re.escape(name)}(?:{{(.*)}})? (\S+)", line)
        if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
            total += float(match[2])
    return total


def scheduled_seconds(process: psutil.Process) -> float:
    """Returns the CPU time of all live threads by the scheduler, because psutil has a resolution of 10 ms."""
    total = 0
    for task in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it ended
            total += int(task.read_text().split()[0])
    return total / 1e9


def processes_of_session(pid: int) -> list[psutil.Process]:
    """Returns live processes of the sessions that `pid` and its descendants lead."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
