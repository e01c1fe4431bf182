"""The interface of staging memory, which the network reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.worker.core import BlockId
from baton.worker.transfer.base import KvConversion, Piece
from baton.worker.transfer.bulk import SlotCopy
from baton.worker.transfer.kinds.rdma.nixl import Memory


class Region(Protocol):
    """Contiguous memory for one sender's slots."""

    memory: Memory

    def close(self) -> None:
        """Frees the memory. No agent may have it registered any more. Idempotent."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """A piece that is being copied into staging memory."""

    num_bytes: int
    ready: SlotCopy | None  # None: the copy has ended


class SlotAccess(Protocol):
    """The receiver's access to a region, as in BulkReceiver."""

    def checksum(self, slot: int, num_bytes: int) -> int:
        """Returns the checksum of the slot's bytes, as in piece headers."""

    def write(self, slot: int, layers: range, block_ids: Sequence[BlockId], heads: tuple[int, int] | None) -> SlotCopy:
        """Starts to copy the slot, [blocks, layers, bytes], into these blocks of the pool."""


class Staging(Protocol):
    """Staging memory close to the pool. Thread-safe."""

    @property
    def cuda_major(self) -> int | None:
        """The CUDA version of the memory. None: host memory."""

    def allocate(self, num_bytes: int) -> Region:
        """Allocates memory for slots. Raises a ServiceError if there is none."""

    def gather(self, piece: Piece, conversion: KvConversion | None, region: Region, start: int, limit: int) -> Gathered:
        """Starts to copy a piece to `start` of the region. Raises InvalidRequest if it is larger than `limit`."""

    def access(self, region: Region, slot_bytes: int) -> SlotAccess:
        """Returns access to the pieces that senders put into the region."""
