"""Staging memory that the network reads and writes, and how pieces get there and back: what is asked of it."""

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
        """Frees it. No agent has it registered any more. Idempotent."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """A piece on its way into staging memory."""

    num_bytes: int
    ready: SlotCopy | None  # None: it is in


class SlotAccess(Protocol):
    """The receiver's side of a region, as BulkReceiver has it."""

    def checksum(self, slot: int, num_bytes: int) -> int:
        """Of the slot's bytes, as frames have it."""

    def write(self, slot: int, layers: range, block_ids: Sequence[BlockId], heads: tuple[int, int] | None) -> SlotCopy:
        """Begins to copy the slot, [blocks, layers, bytes], into these blocks of the pool."""


class Staging(Protocol):
    """Where the pool is, and so where staging is best. Thread-safe."""

    @property
    def cuda_major(self) -> int | None:
        """Of the CUDA that the memory is of. None: it is the host's."""

    def allocate(self, num_bytes: int) -> Region:
        """Memory for slots. Raises a ServiceError where there is none."""

    def gather(self, piece: Piece, conversion: KvConversion | None, region: Region, start: int, limit: int) -> Gathered:
        """Begins to copy a piece to `start` of the region. Raises InvalidRequest for one of more than `limit` bytes."""

    def access(self, region: Region, slot_bytes: int) -> SlotAccess:
        """Checks and scatters what senders put into the region."""
