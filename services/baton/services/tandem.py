"""What a tandem on one machine consists of: its processes, their flags and addresses. Starts nothing."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.services import ports
from baton.services.settings import SettingsError

SAMPLE_MODEL = Path(__file__).resolve().parents[3] / "models" / "storyteller-7m"


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
    served_model_name: str = field(
        default="", metadata={"help": "The model's name for clients. Empty: the folder's name.", "metavar": "NAME"}
    )
    executor: str = field(
        default="cpu",
        metadata={"help": "What computes: the model on the CPU, or a simulation of one.", "choices": ("cpu", "sim")},
    )
    prefill_workers: int = field(default=1, metadata={"help": "Prefill workers.", "minimum": 0, "maximum": 64})
    decode_workers: int = field(default=1, metadata={"help": "Decode workers.", "minimum": 1, "maximum": 64})
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
    log_dir: str = field(
        default="",
        metadata={"help": "Folder for the services' logs. Empty: a temporary one, removed on a clean stop."},
    )
    log_format: str = field(default="text", metadata={"help": "How log lines look.", "choices": ("text", "json")})
    ready_timeout: float = field(
        default=600.0, metadata={"help": "Give up when not ready after this many seconds.", "minimum": 1}
    )


class Probe(enum.Enum):
    """How a service tells that it is ready."""

    GRPC_HEALTH = "grpc"
    HTTP_READY = "http"


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """One process of the tandem."""

    name: str
    command: str  # of the `baton` CLI
    flags: tuple[str, ...]
    address: str  # of its gRPC server
    metrics: str  # host:port of its /metrics
    probe: Probe
    probe_address: str
    stop_stage: int  # processes stop stage by stage, lowest first

    @property
    def arguments(self) -> tuple[str, ...]:
        """The CLI's words."""
        return (self.command, *self.flags)


def plan(config: UpConfig, model: str, choose_ports: Callable[[int], Sequence[int]]) -> list[ServicePlan]:
    """Every process of the tandem, gateway first. `model` is the folder on disk."""
    num_workers = config.prefill_workers + config.decode_workers
    addresses = [f"127.0.0.1:{port}" for port in choose_ports(2 * (2 + num_workers))]
    pairs = list(zip(addresses[::2], addresses[1::2], strict=True))
    kvstore, router, *rest = pairs
    name = config.served_model_name or Path(model).resolve().name
    workers = [_worker(config, model, name, kvstore[0], index, pair) for index, pair in enumerate(rest)]
    return [
        _gateway(config, model, name, router[0]),
        _internal("router", 1, router, "--kvstore", kvstore[0], "--workers", ",".join(w.address for w in workers)),
        *workers,
        _internal("kvstore", 3, kvstore, *(("--redis-url", config.redis_url) if config.redis_url else ())),
    ]


def resolve_model(config: UpConfig) -> str:
    """The model's folder on this machine; a hub id is downloaded. SettingsError: there is none."""
    if not config.model:
        if SAMPLE_MODEL.is_dir():
            return str(SAMPLE_MODEL)
        raise SettingsError("--model is required: this is no checkout with models/storyteller-7m")
    path = Path(config.model).expanduser()
    if path.is_dir():
        return str(path.resolve())
    if path.is_absolute() or config.model.startswith((".", "~")) or config.model.count("/") != 1:
        raise SettingsError(f"--model: {config.model!r} is no folder; give a Hugging Face model folder or a hub id")
    return _download(config.model)


def _download(hub_id: str) -> str:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise SettingsError(f"--model: {hub_id!r} is no folder, and hub ids need the extra `hub`") from None
    try:
        return str(snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise SettingsError(f"--model: {hub_id!r} is no folder, and not to be had from the hub: {reason}") from error


def check_listen_addresses(config: UpConfig) -> UpConfig:
    """The config with real ports for port 0. SettingsError: an address cannot be listened on."""
    rest = _usable("--rest-listen", config.rest_listen)
    grpc = _usable("--grpc-listen", config.grpc_listen)
    if rest == grpc:
        raise SettingsError(f"--rest-listen and --grpc-listen are both {rest}; give two addresses")
    return replace(config, rest_listen=rest, grpc_listen=grpc)


def _usable(flag: str, address: str) -> str:
    if problem := ports.why_unusable(address):
        raise SettingsError(f"{flag} {address}: {problem}; give another with {flag} HOST:PORT")
    host, port = ports.split_address(address)
    return address if port else f"{host}:{ports.free_ports(1, host)[0]}"


def _gateway(config: UpConfig, model: str, name: str, router: str) -> ServicePlan:
    flags = ("--rest-listen", config.rest_listen, "--grpc-listen", config.grpc_listen, "--router", router)
    return ServicePlan(
        name="gateway",
        command="gateway",
        flags=(*flags, "--model", model, "--served-model-name", name, "--log-format", config.log_format),
        address=config.grpc_listen,
        metrics=config.rest_listen,
        probe=Probe.HTTP_READY,
        probe_address=config.rest_listen,
        stop_stage=0,
    )


def _worker(config: UpConfig, model: str, name: str, kvstore: str, index: int, listen: tuple[str, str]) -> ServicePlan:
    prefill = index < config.prefill_workers
    role = "prefill" if prefill else "decode" if config.prefill_workers else "both"
    number = index if prefill else index - config.prefill_workers
    worker_id = f"{role}-{number}"
    flags = ("--role", role, "--worker-id", worker_id, "--kvstore", kvstore, "--executor", config.executor)
    return _internal(
        "worker", 2, listen, *flags, "--model", model, "--served-model-name", name,
        name=f"worker {worker_id}", log_format=config.log_format,
    )  # fmt: skip


def _internal(
    command: str, stage: int, listen: tuple[str, str], *flags: str, name: str = "", log_format: str = "text"
) -> ServicePlan:
    address, metrics = listen
    return ServicePlan(
        name=name or command,
        command=command,
        flags=("--listen", address, "--metrics-listen", metrics, *flags, "--log-format", log_format),
        address=address,
        metrics=metrics,
        probe=Probe.GRPC_HEALTH,
        probe_address=address,
        stop_stage=stage,
    )
