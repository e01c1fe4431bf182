"""The settings of access control."""

from __future__ import annotations

from dataclasses import dataclass

FROM_REDIS = "redis"


@dataclass(frozen=True, slots=True)
class AccessSettings:
    api_keys: str = ""  # path of a key file, or "redis"; empty: no keys
    redis_url: str = ""
    replicas: int = 1  # gateways that share the limits when Redis is unavailable
    redis_timeout: float = 0.05  # seconds
