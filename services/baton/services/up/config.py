"""The settings of `baton up` and `baton serve`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from baton.plugins import kinds
from baton.rpc.errors import InvalidRequest
from baton.rpc.model_names import check_names
from baton.services.up.layout import EXECUTORS, Counts

_MAX_WORKERS = 64


@dataclass(frozen=True, slots=True)
class TandemConfig:
    """The settings of all services on one machine. Flags of gateway and workers are forwarded besides."""

    model: str = field(
        default="",
        metadata={
            "help": "A Hugging Face model folder or a GGUF file, or a hub id where the hub is reachable. "
            "Empty: the sample model, storyteller-7m.",
            "metavar": "PATH",
        },
    )
    revision: str = field(
        default="", metadata={"help": "Branch, tag or commit of a hub id. Empty: its main branch.", "metavar": "NAME"}
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
    api_keys: str = field(
        default="",
        metadata={
            "help": "The gateway's --api-keys: a file, or redis, for those in --redis-url.",
            "metavar": "PATH|redis",
        },
    )
    plugins: tuple[str, ...] = field(default=(), metadata=kinds.SETTING)
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
        metadata={
            "help": "Redis to keep the index in. Empty: one of its own if installed, or memory.",
            "metavar": "URL",
        },
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
    gateway_processes: int = field(
        default=1,
        metadata={"help": "The gateway's --processes, which share its addresses.", "minimum": 1, "maximum": 256},
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
        metadata={
            "help": "Folder for the services' logs. Empty: a temporary one, removed on a clean stop.",
            "metavar": "FOLDER",
        },
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


def _count(what: str, default: int = 0, minimum: int = 0, also: str = "") -> Any:
    return field(default=default, metadata={"help": what, "minimum": minimum, "maximum": _MAX_WORKERS, "also": also})


_EXECUTOR = {
    "help": "What computes: CUDA devices, the CPU, or a simulation. auto: cuda where a usable GPU is, else cpu.",
    "choices": EXECUTORS,
}


@dataclass(frozen=True, slots=True)
class UpConfig(TandemConfig):
    """The settings of `baton up`: a tandem, on the CPU by default."""

    executor: str = field(default="cpu", metadata=_EXECUTOR)
    prefill_workers: int = _count("Prefill workers. --prefill is the same.", default=1, also="prefill")
    decode_workers: int = _count(
        "Decode workers; --decode is the same. Without prefill workers they do both.",
        default=1,
        minimum=1,
        also="decode",
    )

    @property
    def counts(self) -> Counts:
        """Returns the numbers of workers."""
        if self.prefill_workers:
            return Counts(self.prefill_workers, self.decode_workers, 0)
        return Counts(both=self.decode_workers)


@dataclass(frozen=True, slots=True)
class ServeConfig(TandemConfig):
    """The settings of `baton serve`: what suits this machine by default."""

    model: str = field(
        default="",
        metadata={
            "help": "A Hugging Face model folder or a GGUF file, or a hub id where the hub is reachable. "
            "Empty: the sample model, storyteller-7m.",
            "metavar": "MODEL",
            "positional": True,
        },
    )
    host: str = field(
        default="", metadata={"help": "Host of the REST API. Empty: that of --rest-listen.", "metavar": "HOST"}
    )
    port: int | None = field(
        default=None,
        metadata={"help": "Port of the REST API. None: that of --rest-listen.", "minimum": 0, "maximum": 65535},
    )
    executor: str = field(default="auto", metadata=_EXECUTOR)
    prefill: int = _count("Workers that prefill for others; they need some that decode.")
    decode: int = _count("Workers that decode what others have prefilled.")
    both: int = _count("Workers that prefill and decode. Without any count: one on each GPU, or one on the CPU.")

    @property
    def counts(self) -> Counts | None:
        """Returns the numbers of workers that are set, or None."""
        counts = Counts(self.prefill, self.decode, self.both)
        return counts if counts.total else None

    def with_rest_address(self) -> ServeConfig:
        """Returns the settings with --host and --port in rest_listen."""
        host, _, port = self.rest_listen.rpartition(":")
        host = f"[{self.host}]" if ":" in self.host.strip("[]") and not self.host.startswith("[") else self.host or host
        return replace(self, rest_listen=f"{host}:{port if self.port is None else self.port}")

    def validate(self) -> None:
        """Raises InvalidRequest for a duplicate name, or counts that cannot serve."""
        check_names(self.served_model_name)
        if self.prefill and not (self.decode or self.both):
            raise InvalidRequest(
                f"prefill={self.prefill} needs workers that decode; add --decode 1, or give --both", field="prefill"
            )
        if self.decode and not self.prefill:
            raise InvalidRequest(
                f"decode={self.decode} needs workers that prefill; add --prefill 1, or give --both {self.decode}",
                field="decode",
            )
