"""The plan of a tandem on one machine: its processes, their flags and addresses. Starts nothing."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from baton.plugins.plugins import names_for
from baton.rpc.address import split_address
from baton.rpc.errors import InvalidRequest
from baton.rpc.identity.identity import OPERATOR
from baton.rpc.model_names import default_name
from baton.rpc.tls.credentials import Tls
from baton.rpc.tls.files import TlsFiles
from baton.services import ports
from baton.services.certs.command import CA_CERTIFICATE, edge_flags, file_names, tls_flags
from baton.services.settings import SettingsError
from baton.services.up.config import TandemConfig
from baton.services.up.layout import Layout, PlannedWorker

C = TypeVar("C", bound=TandemConfig)
ChoosePorts = Callable[[int, str], Sequence[int]]  # how many, host


@dataclass(frozen=True, slots=True)
class TlsPlan:
    """Returns a tandem's TLS settings. Checks them, so that an error is reported before a service fails."""

    probing: Tls | None = None  # what probes show services, as an operator. None: plain text
    edge_ca: str = ""  # whose certificate the gateway shows clients. Empty: plain text


def plan_tls(config: TandemConfig) -> TlsPlan:
    """Reads the files that probes need. Raises SettingsError."""
    folder = config.tls_dir
    if not folder:
        if config.tls_edge:
            raise SettingsError("--tls-edge needs --tls-dir FOLDER, made by `baton certs`")
        return TlsPlan()
    ca = f"{folder}/{CA_CERTIFICATE}"
    certificate, key = (f"{folder}/{name}" for name in file_names(OPERATOR))
    try:
        return TlsPlan(Tls(TlsFiles(certificate, key, ca), OPERATOR), ca if config.tls_edge else "")
    except InvalidRequest as error:
        raise SettingsError(f"--tls-dir {folder}: {error.message}; `baton certs` makes such a folder") from error


class Probe(enum.Enum):
    """How a service's readiness is probed."""

    GRPC_HEALTH = "grpc"
    HTTP_READY = "http"


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """One process of the tandem."""

    name: str
    command: str  # of the `baton` CLI
    flags: tuple[str, ...]
    secrets: Mapping[str, str]  # variables: every user of the machine can read arguments
    address: str  # of its gRPC server
    metrics: str  # host:port of its /metrics
    probe: Probe
    probe_address: str
    stop_stage: int  # processes stop stage by stage, lowest first
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command line arguments of the service."""
        return (self.command, *self.flags)


def plan(
    config: TandemConfig,
    layout: Layout,
    model: str,
    num_cores: int,
    choose_ports: Callable[[int], Sequence[int]],
    forwarded: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> list[ServicePlan]:
    """Returns every process, gateway first. `model` is the folder on disk; `forwarded`: more flags, by command."""
    # More threads than cores wait for each other: on two cores, two workers of two threads are ten times slower.
    threads = config.threads or max(1, num_cores // len(layout.workers))
    addresses = [f"127.0.0.1:{port}" for port in choose_ports(2 * (2 + len(layout.workers)))]
    kvstore, router, *workers = zip(addresses[::2], addresses[1::2], strict=True)
    worker_addresses = ",".join(address for address, _ in workers)
    names = model_names(config, model)
    common = ("--model", model, "--drain-timeout", str(config.drain_timeout))
    to_worker = (
        *("--executor", layout.executor, "--threads", str(threads), "--kvstore", kvstore[0]),
        *(*common, "--served-model-name", names[0]),  # workers have one name for it
        *forwarded.get("worker", ()),
    )
    to_gateway = ("--router", router[0], *common, "--served-model-name", ",".join(names), *forwarded.get("gateway", ()))
    return [
        _gateway(config, to_gateway),
        _internal(config, "router", "router", 1, router, ("--kvstore", kvstore[0], "--workers", worker_addresses)),
        *(_worker(config, worker, listen, to_worker) for worker, listen in zip(layout.workers, workers, strict=True)),
        _internal(config, "kvstore", "kvstore", 3, kvstore, (), {"BATON_KVSTORE_REDIS_URL": config.redis_url}),
    ]


def model_names(config: TandemConfig, model: str) -> tuple[str, ...]:
    """Returns the model's names for clients, the workers' first."""
    # Commas and spaces separate names.
    return config.served_model_name or ("_".join(default_name(model).replace(",", "_").split()),)


def scrape_targets(plans: Sequence[ServicePlan]) -> list[dict[str, object]]:
    """Returns the addresses of metrics, in the form of Prometheus' file_sd_configs."""
    return [{"targets": [one.metrics], "labels": {"service": f"baton-{one.command}", "pod": one.name}} for one in plans]


def _worker(
    config: TandemConfig, worker: PlannedWorker, listen: tuple[str, str], flags: tuple[str, ...]
) -> ServicePlan:
    own = ("--role", worker.role, "--worker-id", worker.worker_id)
    made = _internal(config, "worker", f"worker {worker.worker_id}", 2, listen, (*own, *flags))
    return replace(made, variables=worker.variables)


def _gateway(config: TandemConfig, flags: tuple[str, ...]) -> ServicePlan:
    listen = ("--rest-listen", config.rest_listen, "--grpc-listen", config.grpc_listen)
    return ServicePlan(
        name="gateway",
        command="gateway",
        flags=(
            *listen,
            *flags,
            *(("--processes", str(config.gateway_processes)) if config.gateway_processes > 1 else ()),
            *(("--api-keys", config.api_keys) if config.api_keys else ()),
            *_plugin_flags(config, "gateway"),
            *_tls_flags(config, "gateway"),
            *_trace_flags(config, "gateway"),
            "--log-format",
            config.log_format,
        ),
        secrets={"BATON_GATEWAY_REDIS_URL": config.redis_url} if _needs_redis(config, flags) else {},
        address=config.grpc_listen,
        metrics=config.rest_listen,
        probe=Probe.HTTP_READY,
        probe_address=config.rest_listen,
        stop_stage=0,
    )


def _needs_redis(config: TandemConfig, flags: Sequence[str]) -> bool:
    """Returns whether the gateway keeps keys, what its processes share, or lasting files and batches in --redis-url."""
    stores_batches = any(flag.partition("=")[0] == "--batch-store" for flag in flags)
    return bool(config.redis_url) and (bool(config.api_keys) or config.gateway_processes > 1 or stores_batches)


def _trace_flags(config: TandemConfig, service: str) -> tuple[str, ...]:
    if not config.otlp_endpoint or service == "kvstore":
        return ()
    sampling = ("--trace-sampling", str(config.trace_sampling)) if service == "gateway" else ()
    return ("--otlp-endpoint", config.otlp_endpoint, *sampling)


def _plugin_flags(config: TandemConfig, service: str) -> tuple[str, ...]:
    """Returns the flag with those plugins that the service loads. Raises SettingsError for an unknown one."""
    try:
        names = names_for(service, config.plugins)
    except InvalidRequest as error:
        raise SettingsError(f"--{error.message}") from error
    return ("--plugins", ",".join(names)) if names else ()


def _tls_flags(config: TandemConfig, service: str) -> tuple[str, ...]:
    if not config.tls_dir:
        return ()
    edge = edge_flags(config.tls_dir) if config.tls_edge and service == "gateway" else ()
    return (*tls_flags(config.tls_dir, service), *edge)


def _internal(
    config: TandemConfig,
    command: str,
    name: str,
    stage: int,
    listen: tuple[str, str],
    flags: tuple[str, ...],
    secrets: Mapping[str, str] = MappingProxyType({}),
) -> ServicePlan:
    address, metrics = listen
    return ServicePlan(
        name=name,
        command=command,
        flags=(
            "--listen",
            address,
            "--metrics-listen",
            metrics,
            *flags,
            *_plugin_flags(config, command),
            *_tls_flags(config, command),
            *_trace_flags(config, command),
            "--log-format",
            config.log_format,
        ),
        secrets=secrets,
        address=address,
        metrics=metrics,
        probe=Probe.GRPC_HEALTH,
        probe_address=address,
        stop_stage=stage,
    )


def check_listen_addresses(config: C, choose_ports: ChoosePorts) -> C:
    """Returns the config with real ports for port 0. Raises SettingsError if an address cannot be listened on."""
    rest = _usable("--rest-listen", config.rest_listen, choose_ports)
    grpc = _usable("--grpc-listen", config.grpc_listen, choose_ports, besides=(port_of(rest),))
    if rest == grpc:
        raise SettingsError(f"--rest-listen and --grpc-listen are both {rest}; give two addresses")
    return replace(config, rest_listen=rest, grpc_listen=grpc)


def port_of(address: str) -> int:
    """Returns the port of host:port."""
    return split_address(address, "address")[1]


def _usable(flag: str, address: str, choose_ports: ChoosePorts, besides: Collection[int] = ()) -> str:
    if problem := ports.why_unusable(address):
        raise SettingsError(f"{flag} {address}: {problem}; give another with {flag} HOST:PORT")
    host, port = split_address(address, flag)
    if port:
        return address
    chosen = choose_ports(1 + len(besides), host.strip("[]"))
    return f"{host}:{next(one for one in chosen if one not in besides)}"
