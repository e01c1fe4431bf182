"""The router's settings and which values fit together. Knows no flag parser and no environment."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.plugins import kinds
from baton.router.discovery.kubernetes_api import DEFAULT_URL, KubernetesApi
from baton.router.discovery.sources import check_sources
from baton.rpc.address import split_address, split_addresses
from baton.rpc.errors import InvalidRequest
from baton.rpc.tls import settings as tls_settings
from baton.rpc.tls.files import TlsFiles, tls_files


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of one router: addresses, discovery, the index and the limits of placement."""

    listen: str = field(default="127.0.0.1:8200", metadata={"help": "gRPC address.", "metavar": "HOST:PORT"})
    metrics_listen: str = field(
        default="", metadata={"help": "Prometheus address. Empty: off.", "metavar": "HOST:PORT"}
    )
    plugins: tuple[str, ...] = field(default=(), metadata=kinds.SETTING)
    tls_certificate: str = field(default="", metadata=tls_settings.CERTIFICATE)
    tls_key: str = field(default="", metadata=tls_settings.KEY)
    tls_ca: str = field(default="", metadata=tls_settings.CA)
    metrics_plain: bool = field(default=False, metadata=tls_settings.METRICS_PLAIN)
    workers: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "The workers: host:port, dns://name:port (resolved again every 5 s), or "
            "k8s://namespace/service:port (its EndpointSlices are watched, with the extra `kubernetes`).",
            "metavar": "HOST:PORT,..",
        },
    )
    peers: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Other routers of this fleet, named like workers; this router itself may be among them.",
            "metavar": "HOST:PORT,..",
        },
    )
    kubernetes_api: str = field(
        default=DEFAULT_URL,
        metadata={"help": "API server for k8s:// addresses; the pod's service account is used.", "metavar": "URL"},
    )
    kvstore: str = field(
        default="",
        metadata={
            "help": "The kvstore that the prefix index comes from, several replicas with commas. "
            "Empty: placement knows no prefixes.",
            "metavar": "HOST:PORT,..",
        },
    )
    state_interval_ms: int = field(
        default=1000,
        metadata={
            "help": "Longest milliseconds between a worker's states. Without a state for three times that, it is dead.",
            "minimum": 50,
            "maximum": 60_000,
        },
    )
    max_queue_depth: int = field(
        default=256,
        metadata={
            "help": "Requests that may wait at one worker; when all are beyond, requests are refused.",
            "minimum": 1,
        },
    )
    ttft_objective_ms: int = field(
        default=1000,
        metadata={"help": "Milliseconds that readers wait for a first token without complaint.", "minimum": 1},
    )
    itl_objective_ms: int = field(
        default=50,
        metadata={
            "help": "Milliseconds between tokens that readers take without complaint. Against the one above it says "
            "how much a slower stream counts.",
            "minimum": 1,
        },
    )
    shed: bool = field(
        default=False,
        metadata={
            "help": "Refuse at once what would wait for more than half of the TTFT objective, what is beyond its "
            "tenant's share while requests wait, and what would make more streams miss the two objectives than it adds."
        },
    )
    otlp_endpoint: str = field(
        default="",
        metadata={
            "help": "OpenTelemetry collector of traced placements' spans: http://HOST:PORT for OTLP over gRPC, with "
            "/v1/traces for OTLP over HTTP. Empty: none.",
            "metavar": "URL",
        },
    )
    explain_capacity: int = field(
        default=4096, metadata={"help": "Number of placements that are kept for Explain.", "minimum": 1}
    )

    @property
    def tls(self) -> TlsFiles | None:
        """Files for TLS between services; None: plain text. Raises InvalidRequest if some but not all are set."""
        return tls_files(self.tls_certificate, self.tls_key, self.tls_ca)

    def validate(self) -> None:
        """Raises InvalidRequest where fields contradict each other."""
        _ = self.tls
        split_address(self.listen, "listen")
        if self.metrics_listen:
            split_address(self.metrics_listen, "metrics_listen")
        split_addresses(self.kvstore, "kvstore")
        if not self.workers:
            raise InvalidRequest("workers is empty; give at least one host:port", field="workers")
        check_sources(self.workers, "workers")
        check_sources(self.peers, "peers")
        KubernetesApi(self.kubernetes_api).validate("kubernetes_api")

    @property
    def state_interval_seconds(self) -> float:
        """state_interval_ms in seconds."""
        return self.state_interval_ms / 1000
