"""The parts of a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.rpc.errors import InvalidRequest
from baton.services.simulate.cluster.adapters import AdapterMemorySettings
from baton.services.simulate.cluster.device import DeviceModel
from baton.worker.scheduling.settings import EngineSettings

ROLES = ("both", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds that messages take."""

    place: float = 0.001  # gateway to router and back
    submit: float = 0.0005  # gateway to worker, and tokens back
    report: float = 0.0005  # a worker's state to the router
    events: float = 0.022  # block events to the router's index, their batching included
    removals: float = 0.007  # the same of removals, for which no batch waits
    peer: float = 0.0005  # worker to worker


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Workers, their device and limits, and the router's."""

    roles: tuple[str, ...] = ("both",) * 8  # one for each worker
    device: DeviceModel = field(default_factory=DeviceModel)
    block_size: int = 64
    num_blocks: int = 12_288  # of each worker's pool
    state_blocks: int = 0  # blocks that a state of recurrent layers takes; 0: the model has none
    drafts: int = 0  # guessed tokens of a request in a step, at most
    acceptance: float = 0.7  # chance of each
    max_model_len: int = 131_072
    engine: EngineSettings = field(default_factory=EngineSettings)
    delays: Delays = field(default_factory=Delays)
    adapters: AdapterMemorySettings = field(default_factory=AdapterMemorySettings)
    max_queue_depth: int = 256  # the router's
    max_attempts: int = 3  # placements of one request until it fails
    coast: bool = True  # take decode steps that need no decision at once
    exact: bool = False  # observe all workers for every placement, and make reports that are replaced unread, too

    def validate(self) -> None:
        """Raises InvalidRequest for a cluster that cannot be."""
        if not self.roles:
            raise InvalidRequest("roles is empty; name at least one worker", field="roles")
        for role in self.roles:
            if role not in ROLES:
                raise InvalidRequest(f"role {role!r} is unknown; roles are {', '.join(ROLES)}", field="roles")
        if all(role == "prefill" for role in self.roles):
            raise InvalidRequest("every worker only prefills; at least one must decode", field="roles")
        for name in ("block_size", "num_blocks", "max_model_len", "max_queue_depth", "max_attempts"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be at least 1", field=name)
        if self.state_blocks < 0:
            raise InvalidRequest(f"state_blocks is {self.state_blocks}; it must not be negative", field="state_blocks")
        if self.state_blocks and set(self.roles) != {"both"}:
            raise InvalidRequest(
                "workers of a model with states hand nothing over: every role must be both", field="roles"
            )
        if self.drafts < 0:
            raise InvalidRequest(f"drafts is {self.drafts}; it must not be negative", field="drafts")
        if not 0 <= self.acceptance <= 1:
            raise InvalidRequest(f"acceptance is {self.acceptance}; it must be from 0 to 1", field="acceptance")
        if self.drafts and self.state_blocks:
            raise InvalidRequest("models with states take no guesses: drafts must be 0", field="drafts")
        self.device.validate()
        self.adapters.validate()
        self.engine.validate()
