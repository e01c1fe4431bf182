"""Limits of connections and requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of connections and requests. Times are in seconds."""

    max_body_bytes: int = 16 << 20
    max_header_bytes: int = 32 << 10
    max_connections: int = 16384
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    idle_timeout: float = 75.0
    stall_timeout: float = 120.0
