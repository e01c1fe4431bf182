"""Staging in host memory for the rdma transport, for workers whose blocks the host can read and write."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

from baton.rpc.errors import InvalidRequest, NoCapacity
from baton.worker.core import BlockId
from baton.worker.executors.base import Executor
from baton.worker.transfer.base import KvConversion, Piece
from baton.worker.transfer.bulk import EndedCopy, SlotCopy
from baton.worker.transfer.kinds.rdma.nixl import Memory
from baton.worker.transfer.kinds.rdma.staging import Gathered, Region
from baton.worker.transfer.piece_bytes import num_piece_bytes, read_piece, write_piece
from baton.worker.transfer.wire.checksum import checksum_of


class HostRegion:
    """Anonymous memory, whose pages are allocated when they are first written."""

    def __init__(self, num_bytes: int) -> None:
        pages = mmap.mmap(-1, num_bytes)
        self.view = memoryview(pages)
        self.memory = Memory(ctypes.addressof(ctypes.c_char.from_buffer(pages)), num_bytes)

    def close(self) -> None:
        """Frees the pages once no view is left."""
        self.view = memoryview(b"")


class HostStaging:
    """A Staging in host memory."""

    cuda_major = None

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def allocate(self, num_bytes: int) -> HostRegion:
        """Allocates memory for slots. Raises NoCapacity if the process may have no more."""
        try:
            return HostRegion(num_bytes)
        except OSError as error:
            raise NoCapacity(f"cannot allocate {num_bytes} bytes of staging: {error}") from error

    def gather(self, piece: Piece, conversion: KvConversion | None, region: Region, start: int, limit: int) -> Gathered:
        """Copies the piece, and returns when it is done."""
        assert isinstance(region, HostRegion), "the region is of this staging"
        parts = read_piece(self._executor, piece, conversion)
        num_bytes = sum(part.nbytes for part in parts)
        if num_bytes > limit:
            raise InvalidRequest(f"a piece has {num_bytes} bytes; the receiver's slots have {limit}")
        at = start
        for part in parts:
            region.view[at : at + part.nbytes] = part.cast("B")
            at += part.nbytes
        return Gathered(num_bytes, None)

    def access(self, region: Region, slot_bytes: int) -> HostSlots:
        """Returns access to a region of this staging."""
        assert isinstance(region, HostRegion), "the region is of this staging"
        return HostSlots(self._executor, region, slot_bytes)


class HostSlots:
    """Implements SlotAccess."""

    def __init__(self, executor: Executor, region: HostRegion, slot_bytes: int) -> None:
        self._executor = executor
        self._region = region
        self._slot_bytes = slot_bytes

    def checksum(self, slot: int, num_bytes: int) -> int:
        """Returns the checksum of a slot. Raises InvalidRequest if the slot is too small."""
        return checksum_of(self._bytes(slot, num_bytes))

    def write(self, slot: int, layers: range, block_ids: Sequence[BlockId], heads: tuple[int, int] | None) -> SlotCopy:
        """Copies the slot. Raises InvalidRequest for an unknown slot, layer, block or head."""
        data = self._bytes(slot, num_piece_bytes(self._executor.kv_spec, layers, len(block_ids), heads))
        write_piece(self._executor, data, layers, block_ids, heads)
        return EndedCopy()

    def _bytes(self, slot: int, num_bytes: int) -> memoryview:
        num_slots = self._region.memory.num_bytes // self._slot_bytes
        if not 0 <= slot < num_slots:
            raise InvalidRequest(f"slot {slot} is out of range: there are {num_slots}")
        if not 0 <= num_bytes <= self._slot_bytes:
            raise InvalidRequest(f"{num_bytes} bytes in a slot of {self._slot_bytes}")
        start = slot * self._slot_bytes
        return self._region.view[start : start + num_bytes]
