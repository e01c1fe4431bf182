"""A fleet as processes: gateways, routers, a kvstore, Redis, workers, and proxies between them where asked for."""

from __future__ import annotations

import contextlib
import struct
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from chaos.fleet.proxies import Proxies
from support.gateway.access_rig import key_file
from support.processes import ports
from support.processes.engine_processes import engines_of
from support.processes.stack import MODEL, MODEL_NAME, RedisServer, Service

from baton.rpc.address import split_address
from baton.services.up.tandem import Probe, ServicePlan
from baton.v1 import control_pb2, control_pb2_grpc, router_pb2, router_pb2_grpc

_CLOCK_FOLDER = Path(__file__).parent / "clock"
TENANT = {"weight": 1.0, "requests_per_minute": 10_000_000, "concurrent_requests": 100_000}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a fleet consists of."""

    decode: int = 4
    prefill: int = 1
    gateways: int = 2
    routers: int = 2
    executor: str = "sim"
    places: int = 16  # in each worker's batch
    proxied: bool = False  # workers are reached through proxies
    worker_flags: tuple[str, ...] = ()
    gateway_flags: tuple[str, ...] = ()

    def sizes(self) -> dict[str, int]:
        """Services by kind, those alone that a fault may hit."""
        kinds = {"decode": self.decode, "prefill": self.prefill, "gateway": self.gateways, "router": self.routers}
        return {**kinds, "kvstore": 1}


@dataclass
class Fleet:
    """The running fleet."""

    folder: Path
    shape: Shape
    api_key: str
    redis: RedisServer
    gateways: list[Service]
    routers: list[Service]
    kvstore: Service
    decodes: list[Service]
    prefills: list[Service]
    proxies: Proxies | None  # by worker's name
    # Services end with the thread that started them: these threads live as long as the fleet.
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, "fleet"))

    @property
    def workers(self) -> list[Service]:
        return [*self.decodes, *self.prefills]

    @property
    def services(self) -> list[Service]:
        return [self.kvstore, *self.workers, *self.routers, *self.gateways]

    @property
    def rest(self) -> list[str]:
        """Where clients reach the gateways."""
        return [gateway.plan.probe_address for gateway in self.gateways]

    def of(self, kind: str) -> list[Service]:
        """The services of a kind that faults name."""
        kinds = {"decode": self.decodes, "prefill": self.prefills, "gateway": self.gateways, "router": self.routers}
        return {**kinds, "kvstore": [self.kvstore]}[kind]

    def set_clock(self, shift_seconds: float) -> None:
        """Moves the wall clock of every service."""
        with (self.folder / "clock").open("r+b") as file:
            file.write(struct.pack("<d", shift_seconds))

    def metrics(self, service: Service) -> str:
        """Returns the metrics of a service."""
        request = urllib.request.Request(f"http://{service.plan.metrics}/metrics")
        request.add_header("authorization", f"Bearer {self.api_key}")
        with urllib.request.urlopen(request, timeout=10) as response:
            text: str = response.read().decode()
        return text

    def stats(self, worker: Service) -> control_pb2.GetStatsResponse:
        """A worker's counters, its block pool audited."""
        with grpc.insecure_channel(worker.plan.address) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            return stub.GetStats(control_pb2.GetStatsRequest(audit=True), timeout=10)

    def entries(self, router: Service) -> dict[str, router_pb2.WorkerEntry]:
        """Returns a router's entries of workers, by id."""
        with grpc.insecure_channel(router.plan.address) as channel:
            answer = router_pb2_grpc.RouterServiceStub(channel).ListWorkers(router_pb2.ListWorkersRequest(), timeout=10)
        return {one.state.worker_id: one for one in answer.workers}

    def start(self) -> None:
        for service in self.services:
            service.spawn()
        for service in self.services:
            service.wait_ready()

    def stop(self) -> None:
        for service in reversed(self.services):
            with contextlib.suppress(psutil.Error, OSError):
                for process in processes_of(service):
                    process.resume()
            service.stop_by_force()
        if self.proxies is not None:
            self.proxies.close()
        self.redis.stop()
        self.threads.shutdown()


def processes_of(service: Service) -> list[psutil.Process]:
    """Its own, and those that it started. Empty: it does not run."""
    if service.process is None or service.process.poll() is not None:
        return []
    with contextlib.suppress(psutil.Error):
        own = psutil.Process(service.process.pid)
        return [own, *own.children(recursive=True)]
    return []


def engine_of_service(worker: Service) -> psutil.Process | None:
    """The process that owns a worker's device."""
    if worker.process is None or worker.process.poll() is not None:
        return None
    return next(iter(engines_of(worker.process.pid)), None)


@contextlib.contextmanager
def running_fleet(folder: Path, shape: Shape) -> Iterator[Fleet]:
    """Starts it, and ends whatever is left of it."""
    with ExitStack() as cleanup:
        fleet = _planned(folder, shape)
        fleet.redis.start()
        cleanup.callback(fleet.stop)
        fleet.start()
        yield fleet


def _planned(folder: Path, shape: Shape) -> Fleet:
    (folder / "clock").write_bytes(struct.pack("<d", 0.0))
    keys, (key,) = key_file(folder, [{"tenant": "acme", "scopes": ["admin"]}], {"acme": TENANT})
    num_workers = shape.decode + shape.prefill
    chosen = ports.free_ports(2 * (num_workers + shape.routers + shape.gateways + 1) + 1)
    addresses = iter([f"127.0.0.1:{port}" for port in chosen[1:]])
    redis = RedisServer(folder, chosen[0])
    kvstore = _service(folder, "kvstore", "kvstore", addresses, ("--redis-url", redis.url))
    roles = [("decode" if shape.prefill else "both", f"decode-{number}") for number in range(shape.decode)]
    roles += [("prefill", f"prefill-{number}") for number in range(shape.prefill)]
    named = ("--model", str(MODEL), "--served-model-name", MODEL_NAME)
    workers = []
    for role, name in roles:
        flags = ("--role", role, "--worker-id", name, "--executor", shape.executor, "--threads", "1")
        flags += ("--kvstore", kvstore.plan.address, "--drain-timeout", "3", *named, *shape.worker_flags)
        flags += ("--max-num-requests", str(shape.places))
        workers.append(_service(folder, "worker", name, addresses, flags))
    proxies = None
    reached = {one.plan.name: one.plan.address for one in workers}
    if shape.proxied:
        proxies = Proxies({name: split_address(address, "worker") for name, address in reached.items()})
        reached = proxies.addresses
    routers = _routers(
        folder, shape.routers, addresses, ("--kvstore", kvstore.plan.address, "--workers", ",".join(reached.values()))
    )
    to_router = ("--router", ",".join(one.plan.address for one in routers), "--drain-timeout", "20", *named)
    shared = ("--api-keys", str(keys), "--redis-url", redis.url, "--limit-replicas", str(shape.gateways))
    gateways = [
        _gateway(folder, f"gateway-{number}", addresses, (*to_router, *shared, *shape.gateway_flags))
        for number in range(shape.gateways)
    ]
    return Fleet(
        folder, shape, key, redis, gateways, routers, kvstore, workers[: shape.decode], workers[shape.decode :], proxies
    )


def _routers(folder: Path, count: int, addresses: Iterator[str], flags: Sequence[str]) -> list[Service]:
    own = [(next(addresses), next(addresses)) for _ in range(count)]
    peers = ("--peers", ",".join(address for address, _ in own)) if count > 1 else ()
    return [
        _service(folder, "router", f"router-{number}", iter(pair), (*flags, *peers)) for number, pair in enumerate(own)
    ]


def _service(folder: Path, command: str, name: str, addresses: Iterator[str], flags: Sequence[str]) -> Service:
    address, metrics = next(addresses), next(addresses)
    words = ("--listen", address, "--metrics-listen", metrics, *flags)
    plan = ServicePlan(name, command, words, {}, address, metrics, Probe.GRPC_HEALTH, address, 0)
    return Service(plan, folder / f"{name}.log", _environ(folder))


def _gateway(folder: Path, name: str, addresses: Iterator[str], flags: Sequence[str]) -> Service:
    rest, rpc = next(addresses), next(addresses)
    words = ("--rest-listen", rest, "--grpc-listen", rpc, *flags)
    plan = ServicePlan(name, "gateway", words, {}, rpc, rest, Probe.HTTP_READY, rest, 0)
    return Service(plan, folder / f"{name}.log", _environ(folder))


def _environ(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(_CLOCK_FOLDER), "CHAOS_CLOCK": str(folder / "clock")}
