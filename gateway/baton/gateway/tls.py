"""The gateway's TLS identities: towards services, and at its two edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from baton.gateway.config import GatewayConfig
from baton.rpc.identity.identity import GATEWAY
from baton.rpc.tls.credentials import EdgeTls, Tls


@dataclass(frozen=True, slots=True)
class GatewayTls:
    """TLS identities of this process. None: plain text."""

    services: Tls | None
    rest: EdgeTls | None
    grpc: EdgeTls | None

    @classmethod
    def of(cls, config: GatewayConfig) -> Self:
        """Reads the files that the settings name."""
        return cls(
            services=Tls(config.tls, GATEWAY) if config.tls else None,
            rest=EdgeTls(config.rest_tls) if config.rest_tls else None,
            grpc=EdgeTls(config.grpc_tls) if config.grpc_tls else None,
        )
