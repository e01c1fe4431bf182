"""The kvstore's settings and which values fit together. Knows no flag parser and no environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from baton.plugins import kinds
from baton.rpc.address import split_address
from baton.rpc.errors import InvalidRequest
from baton.rpc.tls import settings as tls_settings
from baton.rpc.tls.files import TlsFiles, tls_files

_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


@dataclass(frozen=True, slots=True)
class KvstoreConfig:
    """Settings of one kvstore: addresses, leases, limits and the store."""

    listen: str = field(default="127.0.0.1:8300", metadata={"help": "gRPC address.", "metavar": "HOST:PORT"})
    metrics_listen: str = field(
        default="", metadata={"help": "Prometheus address. Empty: off.", "metavar": "HOST:PORT"}
    )
    plugins: tuple[str, ...] = field(default=(), metadata=kinds.SETTING)
    tls_certificate: str = field(default="", metadata=tls_settings.CERTIFICATE)
    tls_key: str = field(default="", metadata=tls_settings.KEY)
    tls_ca: str = field(default="", metadata=tls_settings.CA)
    metrics_plain: bool = field(default=False, metadata=tls_settings.METRICS_PLAIN)
    advertise: str = field(
        default="",
        metadata={
            "help": "Address at which other kvstores on the same Redis reach this one. Empty: the listen address, with "
            "the host's own address in place of 0.0.0.0.",
            "metavar": "HOST:PORT",
        },
    )
    lease_ms: int = field(
        default=900,
        metadata={
            "help": "Milliseconds without a message from a worker after which its blocks are ignored.",
            "minimum": 100,
            "maximum": 3_600_000,
        },
    )
    retention_ms: int = field(
        default=60_000,
        metadata={
            "help": "Milliseconds that an ignored worker's blocks are kept, in case the worker returns.",
            "minimum": 100,
            "maximum": 86_400_000,
        },
    )
    watcher_backlog: int = field(
        default=64 << 20,
        metadata={"help": "Unsent bytes allowed for one watcher; above that its stream is ended.", "minimum": 1 << 16},
    )
    store: str = field(
        default="auto",
        metadata={
            "help": "Where the index survives a restart. auto: redis where --redis-url is given, else embedded "
            "where a Redis server is installed, else memory.",
            "choices": ("auto", "redis", "embedded", "memory"),
        },
    )
    redis_url: str = field(
        default="",
        metadata={
            "help": "Redis that keeps the index, a single server or any node of a cluster; kvstores that share it and "
            "the namespace are replicas. Empty: no Redis.",
            "metavar": "URL",
        },
    )
    redis_namespace: str = field(default="baton", metadata={"help": "Prefix of every key in Redis.", "metavar": "NAME"})
    redis_timeout_ms: int = field(
        default=1000, metadata={"help": "Timeout of one Redis command, in milliseconds.", "minimum": 10}
    )
    store_backlog: int = field(
        default=16 << 20,
        metadata={
            "help": "Unwritten bytes allowed for one worker's events; above that a snapshot replaces them.",
            "minimum": 1 << 16,
        },
    )
    data_dir: str = field(
        default="",
        metadata={"help": "Folder for the embedded server's file. Empty: nothing is kept.", "metavar": "FOLDER"},
    )

    @property
    def tls(self) -> TlsFiles | None:
        """Files for TLS between services; None: plain text. Raises InvalidRequest if some but not all are set."""
        return tls_files(self.tls_certificate, self.tls_key, self.tls_ca)

    def validate(self) -> None:
        """Raises InvalidRequest if fields contradict each other."""
        _ = self.tls
        split_address(self.listen, "listen")
        for name in ("metrics_listen", "advertise"):
            value: str = getattr(self, name)
            if value:
                split_address(value, name)
        if self.redis_url:
            _check_redis_url(self.redis_url)
        if self.redis_url and self.store not in ("auto", "redis"):
            raise InvalidRequest(f"redis_url needs store=redis or store=auto, got store={self.store}", field="store")
        if self.store == "redis" and not self.redis_url:
            raise InvalidRequest("store=redis needs redis_url", field="redis_url")
        if self.data_dir and (self.redis_url or self.store == "memory"):
            raise InvalidRequest("data_dir is for the embedded store only", field="data_dir")
        if not self.redis_namespace or any(mark in self.redis_namespace for mark in "{}:"):
            raise InvalidRequest(
                f"redis_namespace={self.redis_namespace!r} must not be empty or contain any of {{}}:",
                field="redis_namespace",
            )

    @property
    def lease_seconds(self) -> float:
        """lease_ms in seconds."""
        return self.lease_ms / 1000

    @property
    def retention_seconds(self) -> float:
        """retention_ms in seconds."""
        return self.retention_ms / 1000


def _check_redis_url(url: str) -> None:
    if not url.startswith(_REDIS_SCHEMES):
        raise InvalidRequest(f"redis_url={url!r} must begin with {' or '.join(_REDIS_SCHEMES)}", field="redis_url")
    if url.startswith("unix://"):
        return
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # raises if the port is not a number
    except ValueError as error:
        raise InvalidRequest(
            f"redis_url={url!r} is not redis://host:port/database: {error}", field="redis_url"
        ) from None
    database = parts.path.strip("/")
    if not host or (database and not database.isdecimal()):
        raise InvalidRequest(
            f"redis_url={url!r} is not redis://host:port/database with a number as database", field="redis_url"
        )
