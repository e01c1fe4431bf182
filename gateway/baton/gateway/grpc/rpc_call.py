"""One call of the public gRPC API, as the services that REST shares with it see it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.gateway.access.identity import Identity
from baton.gateway.resume.journal import Journal


@dataclass(slots=True)
class RpcCall:
    """The call of a gRPC client, as the routes for vectors see it."""

    identity: Identity
    request_id: str
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    outcome: str = "CANCELLED"  # name of the call's final status
    received: float = field(default_factory=time.perf_counter)
    path: str = ""  # the method's full name
    body: bytes = b""
    limit_headers: Mapping[str, str] = field(default_factory=dict)
    journal: Journal | None = None
    on_end: list[Callable[[Any], None]] = field(default_factory=list)

    def end(self) -> None:
        """Ends the call and runs its hooks. Idempotent."""
        hooks, self.on_end = self.on_end, []
        for hook in hooks:
            hook(self)
