"""The receiving end of rdma connections: one agent, and the regions of staging memory that senders write.

A region serves one sender at a time:

    free --take--> in use --its sender is gone--> quarantined --QUARANTINE_SECONDS--> free
                     |
                     +--its sender may write--> lost, until the agent is closed
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from baton.rpc.errors import NoCapacity
from baton.worker.core import BlockId
from baton.worker.transfer.bulk import SlotCopy, Slots
from baton.worker.transfer.kinds.rdma.descriptors import RemoteRegion, encode_region
from baton.worker.transfer.kinds.rdma.nixl import Agent
from baton.worker.transfer.kinds.rdma.staging import Region, Staging

# Bytes in a dead sender's sockets are written after its connection has ended.
QUARANTINE_SECONDS = 2.0


class ReceivingAgent:
    """Staging memory for senders, registered once and reused. Its owner holds a lock around every call."""

    def __init__(
        self,
        bindings: Any,
        name: str,
        staging: Staging,
        region_bytes: int,
        max_regions: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._staging = staging
        self._region_bytes = region_bytes
        self._max_regions = max_regions
        self._clock = clock
        self._blobs: dict[int, bytes] = {}  # of all regions, by address
        self._regions: list[Region] = []
        self._free: deque[tuple[float, Region]] = deque()  # with the time from which each may be reused
        self._num_lost = 0
        self._agent = Agent(bindings, name)

    def take(self) -> tuple[Region, bytes]:
        """Returns a region that no other sender writes, and its blob. Raises NoCapacity if all are in use."""
        if self._free and self._free[0][0] <= self._clock():
            region = self._free.popleft()[1]
        elif len(self._regions) < self._max_regions:
            region = self._make()
        else:
            raise NoCapacity(
                f"{self._max_regions} senders have rdma staging, the maximum; {self._num_lost} of them are lost",
                retry_after_ms=1000,
            )
        return region, self._blobs[region.memory.address]

    def give_back(self, region: Region) -> None:
        """Frees a region whose sender is gone, after the quarantine."""
        self._free.append((self._clock() + QUARANTINE_SECONDS, region))

    def mark_lost(self, region: Region) -> None:
        """Marks a region whose sender may write it until the agent is closed."""
        self._num_lost += 1

    @property
    def is_spent(self) -> bool:
        """Whether the agent is unused, and closing it would free lost regions."""
        return self._num_lost > 0 and self._num_lost + len(self._free) == len(self._regions)

    def close(self) -> None:
        """Ends all access to the memory and frees it. Idempotent."""
        self._agent.close()
        for region in self._regions:
            region.close()
        self._regions.clear()
        self._free.clear()

    def _make(self) -> Region:
        region = self._staging.allocate(self._region_bytes)
        memory = region.memory
        metadata = self._agent.register(memory)
        self._regions.append(region)
        self._blobs[memory.address] = encode_region(RemoteRegion(self._agent.name, metadata, memory))
        return region


class RdmaReceiver:
    """Implements BulkReceiver."""

    writes_ahead = False

    def __init__(self, staging: Staging, region: Region, slots: Slots, closed: Callable[[Region, bool], None]) -> None:
        self.slots = slots
        self._access = staging.access(region, slots.slot_bytes)
        self._region: Region | None = region
        self._closed = closed

    def announced(self, slot: int, num_bytes: int) -> None:
        """Does nothing."""

    def take(self, slot: int, num_bytes: int) -> None:
        """Does nothing: a piece is announced after it has arrived."""

    def checksum(self, slot: int, num_bytes: int) -> int:
        """Returns the checksum of a slot. Raises InvalidRequest if the slot is too small."""
        return self._access.checksum(slot, num_bytes)

    def write(self, slot: int, layers: range, block_ids: Sequence[BlockId], heads: tuple[int, int] | None) -> SlotCopy:
        """Starts to copy the slot. Raises InvalidRequest for an unknown slot or block."""
        return self._access.write(slot, layers, block_ids, heads)

    def abort(self) -> None:
        """Does nothing: there are no waits."""

    def close(self, sender_gone: bool) -> None:
        """Frees the region after the quarantine; never if this sender may still write it."""
        region, self._region = self._region, None
        if region is not None:
            self._closed(region, sender_gone)
