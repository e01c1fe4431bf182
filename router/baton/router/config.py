"""What an operator can set on a router, and which values fit together. Knows no flag parser and no environment."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.rpc.address import split_address
from baton.rpc.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One router: where it listens, which workers it knows, where the index comes from."""

    listen: str = field(default="127.0.0.1:8200", metadata={"help": "gRPC address.", "metavar": "HOST:PORT"})
    metrics_listen: str = field(
        default="", metadata={"help": "Prometheus address. Empty: off.", "metavar": "HOST:PORT"}
    )
    workers: tuple[str, ...] = field(
        default=(), metadata={"help": "gRPC addresses of the workers.", "metavar": "HOST:PORT,.."}
    )
    kvstore: str = field(
        default="",
        metadata={
            "help": "Where the prefix index comes from. Empty: placement knows no prefixes.",
            "metavar": "HOST:PORT",
        },
    )
    state_interval_ms: int = field(
        default=1000,
        metadata={
            "help": "Milliseconds within which a worker tells its state. Unheard of for three of them, it is dead.",
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
    explain_capacity: int = field(
        default=4096, metadata={"help": "Placements that can be asked for afterwards.", "minimum": 1}
    )

    def validate(self) -> None:
        """Raises InvalidRequest where fields contradict each other."""
        split_address(self.listen, "listen")
        for name in ("metrics_listen", "kvstore"):
            value: str = getattr(self, name)
            if value:
                split_address(value, name)
        if not self.workers:
            raise InvalidRequest("workers is empty; give at least one host:port", field="workers")
        for address in self.workers:
            split_address(address, "workers")
        if len(set(self.workers)) != len(self.workers):
            raise InvalidRequest(f"workers={','.join(self.workers)} names an address twice", field="workers")

    @property
    def state_interval_seconds(self) -> float:
        """state_interval_ms in seconds."""
        return self.state_interval_ms / 1000
