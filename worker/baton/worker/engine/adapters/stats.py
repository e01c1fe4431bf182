"""Statistics of the adapters of one engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.v1 import control_pb2
from baton.worker.requests.histogram import Histogram


@dataclass(slots=True)
class AdapterStats:
    """Totals since the engine's start."""

    num_loads: int = 0
    num_failed_loads: int = 0
    num_device_loads: int = 0
    num_device_evictions: int = 0
    num_host_evictions: int = 0
    wait_seconds: Histogram = field(default_factory=Histogram)
    load_seconds: Histogram = field(default_factory=Histogram)

    def message(self) -> control_pb2.AdapterCounters:
        """Returns their form in the contract, without what is present."""
        return control_pb2.AdapterCounters(
            num_loads=self.num_loads,
            num_failed_loads=self.num_failed_loads,
            num_device_loads=self.num_device_loads,
            num_device_evictions=self.num_device_evictions,
            num_host_evictions=self.num_host_evictions,
            wait_seconds=self.wait_seconds.message(),
            load_seconds=self.load_seconds.message(),
        )
