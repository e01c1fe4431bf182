"""What an operator can set on a kvstore, and which values fit together. Knows no flag parser and no environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from baton.rpc import tls_settings
from baton.rpc.address import split_address
from baton.rpc.errors import InvalidRequest
from baton.rpc.tls_files import TlsFiles, tls_files

_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


@dataclass(frozen=True, slots=True)
class KvstoreConfig:
    """One kvstore: where it listens, how long it waits for workers, where the index is kept."""

    listen: str = field(default="127.0.0.1:8300", metadata={"help": "gRPC address.", "metavar": "HOST:PORT"})
    metrics_listen: str = field(
        default="", metadata={"help": "Prometheus address. Empty: off.", "metavar": "HOST:PORT"}
    )
    tls_certificate: str = field(default="", metadata=tls_settings.CERTIFICATE)
    tls_key: str = field(default="", metadata=tls_settings.KEY)
    tls_ca: str = field(default="", metadata=tls_settings.CA)
    metrics_plain: bool = field(default=False, metadata=tls_settings.METRICS_PLAIN)
    advertise: str = field(
        default="",
        metadata={
            "help": "Where other kvstores on the same Redis reach this one. Empty: the listen address, the host's own "
            "address standing for 0.0.0.0.",
            "metavar": "HOST:PORT",
        },
    )
    lease_ms: int = field(
        default=900,
        metadata={
            "help": "Milliseconds that a worker may be unheard of until its blocks do not count.",
            "minimum": 100,
            "maximum": 3_600_000,
        },
    )
    retention_ms: int = field(
        default=60_000,
        metadata={
            "help": "Milliseconds that the blocks of a worker that does not count are kept, should it come back.",
            "minimum": 100,
            "maximum": 86_400_000,
        },
    )
    watcher_backlog: int = field(
        default=64 << 20,
        metadata={"help": "Bytes that may wait for one router; beyond, its stream is cut.", "minimum": 1 << 16},
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
            "help": "Redis to keep the index in, single or any node of a cluster; kvstores that share it and the "
            "namespace are replicas. Empty: none is used.",
            "metavar": "URL",
        },
    )
    redis_namespace: str = field(
        default="baton", metadata={"help": "What every key in Redis begins with.", "metavar": "NAME"}
    )
    redis_timeout_ms: int = field(
        default=1000, metadata={"help": "Milliseconds that one Redis command may take.", "minimum": 10}
    )
    store_backlog: int = field(
        default=16 << 20,
        metadata={"help": "Bytes of one worker's events that may wait for the store.", "minimum": 1 << 16},
    )
    data_dir: str = field(
        default="",
        metadata={"help": "Folder for the embedded server's file. Empty: nothing is kept.", "metavar": "FOLDER"},
    )

    @property
    def tls(self) -> TlsFiles | None:
        """What services show each other; None: plain text. Raises InvalidRequest for half a set."""
        return tls_files(self.tls_certificate, self.tls_key, self.tls_ca)

    def validate(self) -> None:
        """Raises InvalidRequest where fields contradict each other."""
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
                f"redis_namespace={self.redis_namespace!r} must not be empty, nor have any of {{}}: in it",
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
        host, _ = parts.hostname, parts.port  # a port that is no number raises
    except ValueError as error:
        raise InvalidRequest(
            f"redis_url={url!r} is no redis://host:port/database: {error}", field="redis_url"
        ) from None
    database = parts.path.strip("/")
    if not host or (database and not database.isdecimal()):
        raise InvalidRequest(
            f"redis_url={url!r} is no redis://host:port/database, the database being a number", field="redis_url"
        )
