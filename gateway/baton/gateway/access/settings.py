"""What of a gateway's settings decides about access."""

from __future__ import annotations

from dataclasses import dataclass

FROM_REDIS = "redis"


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Keys and limits."""

    api_keys: str = ""  # a file, or "redis"; empty: no keys
    redis_url: str = ""
    replicas: int = 1  # gateways that share the limits where Redis does not decide them
    redis_timeout: float = 0.05  # seconds
