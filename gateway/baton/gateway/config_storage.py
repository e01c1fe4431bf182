"""The gateway's settings of what it stores: responses, files and batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.gateway.config_model import ModelSettings


@dataclass(frozen=True, slots=True)
class StorageSettings(ModelSettings):
    """Settings of stored responses, files and batches."""

    response_ttl: float = field(
        default=86400.0, metadata={"help": "Seconds that a response is kept after its end.", "minimum": 1}
    )
    max_stored_response_bytes: int = field(
        default=64 << 20,
        metadata={"help": "The most bytes of responses in memory, where there is no redis_url.", "minimum": 1024},
    )
    batch_store: str = field(
        default="",
        metadata={
            "help": "Where files and batches (/v1/files, /v1/batches) keep their bytes: a folder that all gateways "
            "see, or s3://BUCKET/PREFIX (also gs:// and az://). Their state is in redis_url. Empty: there are none.",
            "metavar": "FOLDER|URL",
        },
    )
    max_file_bytes: int = field(
        default=200 << 20, metadata={"help": "Largest uploaded file (/v1/files), in bytes.", "minimum": 1024}
    )
    max_tenant_file_bytes: int = field(
        default=100 << 30,
        metadata={"help": "The most bytes of all files of one tenant. 0: any number.", "minimum": 0},
    )
    max_batch_requests: int = field(
        default=50_000, metadata={"help": "The most requests of one batch.", "minimum": 1, "maximum": 1_000_000}
    )
    max_batch_streams: int = field(
        default=2048,
        metadata={
            "help": "The most requests of batches in flight, a part of max_streams. Fewer run where workers refuse "
            "more.",
            "minimum": 1,
        },
    )
