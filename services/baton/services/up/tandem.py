"""The plan of a tandem on one machine: its processes, their flags and addresses. Starts nothing."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from baton.rpc.address import split_address
from baton.rpc.errors import InvalidRequest
from baton.rpc.identity.identity import OPERATOR
from baton.rpc.model_names import check_names
from baton.rpc.tls.credentials import Tls
from baton.rpc.tls.files import TlsFiles
from baton.services import ports
from baton.services.certs.command import CA_CERTIFICATE, edge_flags, file_names, tls_flags
from baton.services.settings import SettingsError


@dataclass(frozen=True, slots=True)
class UpConfig:
    """The settings of `baton up`. All else of a service is set by its own BATON_<SERVICE>_<FIELD> variables."""

    model: str = field(
        default="",
        metadata={
            "help": "A Hugging Face model folder, or a hub id where the hub is reachable. "
            "Empty: the checkout's models/storyteller-7m.",
            "metavar": "PATH",
        },
    )
    served_model_name: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "The model's names for clients, separated by spaces or commas. Answers carry the first, which is "
            "the workers' name too. Given twice, the last counts. Empty: the folder's name.",
            "metavar": "NAME [NAME ..]",
            "spaced": True,
        },
    )
    tool_call_parser: str = field(
        default="",
        metadata={
            "help": "The gateway's --tool-call-parser. Empty: as that is set, or its default.",
            "metavar": "NAME",
        },
    )
    reasoning_parser: str = field(
        default="",
        metadata={
            "help": "The gateway's --reasoning-parser. Empty: as that is set, or its default.",
            "metavar": "NAME",
        },
    )
    tool_parser_plugin: str = field(
        default="", metadata={"help": "The gateway's --tool-parser-plugin: parsers of your own.", "metavar": "PATH"}
    )
    chat_template: str = field(
        default="",
        metadata={"help": "The gateway's --chat-template: a Jinja file instead of the model's.", "metavar": "PATH"},
    )
    trust_request_chat_template: bool = field(
        default=False, metadata={"help": "Requests may bring a chat_template of their own."}
    )
    strict_fields: bool = field(
        default=False, metadata={"help": "The gateway's --strict-fields: refuse requests with unknown fields."}
    )
    default_chat_template_kwargs: str = field(
        default="",
        metadata={"help": "The gateway's --default-chat-template-kwargs, a JSON object.", "metavar": "JSON"},
    )
    api_keys: str = field(
        default="",
        metadata={
            "help": "The gateway's --api-keys: a file, or redis, for those in --redis-url.",
            "metavar": "PATH|redis",
        },
    )
    allow_anonymous: bool = field(
        default=False, metadata={"help": "The gateway's --allow-anonymous: listen anywhere without API keys."}
    )
    executor: str = field(
        default="cpu",
        metadata={"help": "What computes: the model on the CPU, or a simulation of one.", "choices": ("cpu", "sim")},
    )
    prefill_workers: int = field(default=1, metadata={"help": "Prefill workers.", "minimum": 0, "maximum": 64})
    decode_workers: int = field(default=1, metadata={"help": "Decode workers.", "minimum": 1, "maximum": 64})
    threads: int = field(
        default=0,
        metadata={"help": "Compute threads of each worker. 0: they share the cores evenly.", "minimum": 0},
    )
    rest_listen: str = field(
        default="127.0.0.1:8000", metadata={"help": "Address of the REST API.", "metavar": "HOST:PORT"}
    )
    grpc_listen: str = field(
        default="127.0.0.1:8001", metadata={"help": "Address of the public gRPC API.", "metavar": "HOST:PORT"}
    )
    redis_url: str = field(
        default="",
        metadata={"help": "Redis to keep the index in. Empty: kvstore's embedded default.", "metavar": "URL"},
    )
    tls_dir: str = field(
        default="",
        metadata={
            "help": "A folder of `baton certs`: the services show each other its certificates. Empty: plain text.",
            "metavar": "FOLDER",
        },
    )
    tls_edge: bool = field(
        default=False, metadata={"help": "Clients are served over TLS too, with the edge.crt of --tls-dir."}
    )
    otlp_endpoint: str = field(
        default="",
        metadata={
            "help": "Every service's --otlp-endpoint, for example that of `baton traces`: http://127.0.0.1:4317. "
            "Empty: no traces.",
            "metavar": "URL",
        },
    )
    trace_sampling: float = field(
        default=1.0,
        metadata={
            "help": "The gateway's --trace-sampling, where there is an --otlp-endpoint.",
            "minimum": 0.0,
            "maximum": 1.0,
        },
    )
    metrics_targets: str = field(
        default="",
        metadata={
            "help": "A file that gets every service's metrics address, as Prometheus' file_sd_configs reads it. "
            "Empty: none.",
            "metavar": "FILE",
        },
    )
    log_dir: str = field(
        default="",
        metadata={"help": "Folder for the services' logs. Empty: a temporary one, removed on a clean stop."},
    )
    log_format: str = field(default="text", metadata={"help": "How log lines look.", "choices": ("text", "json")})
    drain_timeout: float = field(
        default=3.0, metadata={"help": "Seconds that running requests get at a stop.", "minimum": 0}
    )
    ready_timeout: float = field(
        default=600.0, metadata={"help": "Give up when not ready after this many seconds.", "minimum": 1}
    )

    def validate(self) -> None:
        """Raises InvalidRequest for a duplicate name."""
        check_names(self.served_model_name)


@dataclass(frozen=True, slots=True)
class TlsPlan:
    """Returns a tandem's TLS settings. Checks them, so that an error is reported before a service fails."""

    probing: Tls | None = None  # what probes show services, as an operator. None: plain text
    edge_ca: str = ""  # whose certificate the gateway shows clients. Empty: plain text


def plan_tls(config: UpConfig) -> TlsPlan:
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

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command line arguments of the service."""
        return (self.command, *self.flags)


def plan(
    config: UpConfig, model: str, num_cores: int, choose_ports: Callable[[int], Sequence[int]]
) -> list[ServicePlan]:
    """Returns every process of the tandem, gateway first. `model` is the folder on disk."""
    roles = _worker_roles(config)
    # More threads than cores wait for each other: on two cores, two workers of two threads are ten times slower.
    threads = config.threads or max(1, num_cores // len(roles))
    addresses = [f"127.0.0.1:{port}" for port in choose_ports(2 * (2 + len(roles)))]
    kvstore, router, *workers = zip(addresses[::2], addresses[1::2], strict=True)
    worker_addresses = ",".join(address for address, _ in workers)
    # Commas separate names.
    names = config.served_model_name or (Path(model).resolve().name.replace(",", "_"),)
    common = ("--model", model, "--drain-timeout", str(config.drain_timeout))
    named = (*common, "--served-model-name", names[0])  # workers have one name for it
    return [
        _gateway(config, ("--router", router[0], *common, "--served-model-name", ",".join(names))),
        _internal(config, "router", "router", 1, router, ("--kvstore", kvstore[0], "--workers", worker_addresses)),
        *(
            _internal(config, "worker", f"worker {role}-{number}", 2, listen, (
                "--role", role, "--worker-id", f"{role}-{number}", "--executor", config.executor,
                "--threads", str(threads), "--kvstore", kvstore[0], *named,
            ))
            for (role, number), listen in zip(roles, workers, strict=True)
        ),
        _internal(config, "kvstore", "kvstore", 3, kvstore, (), {"BATON_KVSTORE_REDIS_URL": config.redis_url}),
    ]  # fmt: skip


def scrape_targets(plans: Sequence[ServicePlan]) -> list[dict[str, object]]:
    """Returns the addresses of metrics, in the form of Prometheus' file_sd_configs."""
    return [{"targets": [one.metrics], "labels": {"service": f"baton-{one.command}", "pod": one.name}} for one in plans]


def _worker_roles(config: UpConfig) -> list[tuple[str, int]]:
    """Returns the workers' roles, numbered so that names are unique."""
    others = "decode" if config.prefill_workers else "both"
    return [
        *(("prefill", number) for number in range(config.prefill_workers)),
        *((others, number) for number in range(config.decode_workers)),
    ]


def _gateway(config: UpConfig, flags: tuple[str, ...]) -> ServicePlan:
    listen = ("--rest-listen", config.rest_listen, "--grpc-listen", config.grpc_listen)
    return ServicePlan(
        name="gateway",
        command="gateway",
        flags=(
            *listen,
            *flags,
            *_format_flags(config),
            *_access_flags(config),
            *_tls_flags(config, "gateway"),
            *_trace_flags(config, "gateway"),
            "--log-format",
            config.log_format,
        ),
        secrets={"BATON_GATEWAY_REDIS_URL": config.redis_url} if config.api_keys and config.redis_url else {},
        address=config.grpc_listen,
        metrics=config.rest_listen,
        probe=Probe.HTTP_READY,
        probe_address=config.rest_listen,
        stop_stage=0,
    )


def _access_flags(config: UpConfig) -> list[str]:
    """Returns the gateway's flags for API keys."""
    flags = ["--allow-anonymous"] if config.allow_anonymous else []
    return [*flags, "--api-keys", config.api_keys] if config.api_keys else flags


def _format_flags(config: UpConfig) -> list[str]:
    """Returns the gateway's flags for prompts and outputs. Unset ones are left to the gateway's own variables."""
    names = ("tool_call_parser", "reasoning_parser", "tool_parser_plugin", "chat_template")
    flags: list[str] = []
    for name in (*names, "default_chat_template_kwargs"):
        value = getattr(config, name)
        if value:
            flags += [f"--{name.replace('_', '-')}", value]
    if config.strict_fields:
        flags.append("--strict-fields")
    return [*flags, "--trust-request-chat-template"] if config.trust_request_chat_template else flags


def _trace_flags(config: UpConfig, service: str) -> tuple[str, ...]:
    if not config.otlp_endpoint or service == "kvstore":
        return ()
    sampling = ("--trace-sampling", str(config.trace_sampling)) if service == "gateway" else ()
    return ("--otlp-endpoint", config.otlp_endpoint, *sampling)


def _tls_flags(config: UpConfig, service: str) -> tuple[str, ...]:
    if not config.tls_dir:
        return ()
    edge = edge_flags(config.tls_dir) if config.tls_edge and service == "gateway" else ()
    return (*tls_flags(config.tls_dir, service), *edge)


def _internal(
    config: UpConfig,
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


def check_listen_addresses(config: UpConfig) -> UpConfig:
    """Returns the config with real ports for port 0. Raises SettingsError if an address cannot be listened on."""
    rest = _usable("--rest-listen", config.rest_listen)
    grpc = _usable("--grpc-listen", config.grpc_listen, besides=(port_of(rest),))
    if rest == grpc:
        raise SettingsError(f"--rest-listen and --grpc-listen are both {rest}; give two addresses")
    return replace(config, rest_listen=rest, grpc_listen=grpc)


def port_of(address: str) -> int:
    """Returns the port of host:port."""
    return split_address(address, "address")[1]


def _usable(flag: str, address: str, besides: Collection[int] = ()) -> str:
    if problem := ports.why_unusable(address):
        raise SettingsError(f"{flag} {address}: {problem}; give another with {flag} HOST:PORT")
    host, port = split_address(address, flag)
    return address if port else f"{host}:{ports.free_ports(1, host, besides=besides)[0]}"
