"""ipc between workers with blocks in host memory: slots in memory that both processes map, on one host.

The memory is an anonymous file of the receiver, which the sender opens through /proc. It has no name that could be left
behind: the kernel frees it when the last process that maps it ends, however that happens. Every sender gets its own
memory, so late writes of a stopped sender are never read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from baton.rpc.errors import InvalidRequest, Mismatch, NoCapacity, Unavailable, Unsupported
from baton.worker.core import BlockId
from baton.worker.executors.base import Executor
from baton.worker.transfer.base import KvConversion, Piece
from baton.worker.transfer.bulk import Announce, EndedCopy, SlotCopy, Slots, no_announcement
from baton.worker.transfer.host_identity import process_identity
from baton.worker.transfer.piece_bytes import gather_piece, num_piece_bytes, write_piece
from baton.worker.transfer.wire.checksum import checksum_of

NUM_SLOTS = 4
_MAX_SENDERS = 64
_PREFIX = b"host-memory:"  # distinguishes offers of host memory from those of device memory
_BLOB = struct.Struct("<IIQQQ")  # process id, descriptor, device, inode, bytes


class HostIpcPath:
    """A BulkPath. Raises Unsupported if the system has no anonymous files."""

    def __init__(
        self,
        executor: Executor,
        slot_bytes: int,
        num_slots: int = NUM_SLOTS,
        max_senders: int = _MAX_SENDERS,
        identity: str | None = None,
    ) -> None:
        identity = process_identity() if identity is None else identity
        if not identity or not hasattr(os, "memfd_create"):
            raise Unsupported("ipc between processes of one host needs Linux and /proc")
        self._offer = _PREFIX + identity.encode()
        self._executor = executor
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._max_senders = max_senders
        self._num_senders = 0
        self._lock = threading.Lock()

    @property
    def num_senders(self) -> int:
        """Senders that have slots."""
        return self._num_senders

    def offer(self) -> bytes:
        """Returns the identities of the host and of the process namespace."""
        return self._offer

    def accept(self, offer: bytes) -> HostIpcReceiver:
        """Returns the receiver's end. Raises Mismatch for a sender of another host, NoCapacity above the limit."""
        if offer != self._offer:
            raise Mismatch(
                f"ipc needs both workers on one host, in one process namespace, with blocks in host memory: "
                f"the sender is {offer!r}, this worker {self._offer!r}"
            )
        with self._lock:
            if self._num_senders >= self._max_senders:
                raise NoCapacity(f"{self._max_senders} senders have ipc slots, the maximum")
            self._num_senders += 1
        try:
            return HostIpcReceiver(self._executor, self._num_slots, self._slot_bytes, self._forget)
        except OSError as error:
            self._forget()
            raise NoCapacity(f"cannot allocate memory for {self._num_slots} ipc slots: {error}") from error

    def connect(self, slots: Slots) -> HostIpcSender:
        """Returns the sender's end. Raises InvalidRequest for invalid slots, Unavailable if they cannot be mapped."""
        return HostIpcSender(self._executor, slots)

    def close(self) -> None:
        """Does nothing: connections own the memory."""

    def _forget(self) -> None:
        with self._lock:
            self._num_senders -= 1


class HostIpcReceiver:
    """Implements BulkReceiver."""

    writes_ahead = False

    def __init__(self, executor: Executor, num_slots: int, slot_bytes: int, forget: Callable[[], None]) -> None:
        self._executor = executor
        self._slot_bytes = slot_bytes
        self._forget: Callable[[], None] | None = forget
        self._descriptor = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, num_slots * slot_bytes)
            # If a sender shrank the file, an access would kill this process.
            fcntl.fcntl(
                self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            self._memory: NDArray[np.uint8] | None = _map(self._descriptor, num_slots * slot_bytes)
            status = os.fstat(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise
        blob = _BLOB.pack(os.getpid(), self._descriptor, status.st_dev, status.st_ino, status.st_size)
        self.slots = Slots(num_slots, slot_bytes, blob)

    def announced(self, slot: int, num_bytes: int) -> None:
        pass

    def take(self, slot: int, num_bytes: int) -> None:
        """Does nothing: a piece is announced after it was copied."""

    def checksum(self, slot: int, num_bytes: int) -> int:
        """Returns the checksum of the slot's first bytes."""
        return checksum_of(self._bytes(slot, num_bytes))

    def write(self, slot: int, layers: range, block_ids: Sequence[BlockId], heads: tuple[int, int] | None) -> SlotCopy:
        """Copies the slot, and returns when it is done. Raises InvalidRequest for an unknown layer, block or head."""
        num_bytes = num_piece_bytes(self._executor.kv_spec, layers, len(block_ids), heads)
        write_piece(self._executor, self._bytes(slot, num_bytes), layers, block_ids, heads)
        return EndedCopy()

    def abort(self) -> None:
        pass

    def close(self, sender_gone: bool) -> None:
        """Frees the memory. It belongs to this sender alone, so its late writes are never read."""
        forget, self._forget = self._forget, None
        if forget is not None:
            self._memory = None
            os.close(self._descriptor)
            forget()

    def _bytes(self, slot: int, num_bytes: int) -> memoryview:
        assert self._memory is not None, "the receiver is open"
        start = slot * self._slot_bytes
        return self._memory[start : start + num_bytes].data


class HostIpcSender:
    """A BulkSender. The calling thread copies each piece, while the receiver empties other slots."""

    announces_first = False

    def __init__(self, executor: Executor, slots: Slots) -> None:
        self._executor = executor
        self._slot_bytes = slots.slot_bytes
        self._memory: NDArray[np.uint8] | None = _open(slots)

    def put(
        self, piece: Piece, slot: int, conversion: KvConversion | None, announce: Announce = no_announcement
    ) -> EndedCopy:
        """Copies the piece into its slot, and returns when it is done."""
        assert self._memory is not None, "the sender is open"
        start = slot * self._slot_bytes
        gather_piece(self._executor, piece, conversion, self._memory[start : start + self._slot_bytes])
        return EndedCopy()

    def abort(self) -> None:
        """Does nothing: a copy in host memory ends by itself."""

    def close(self) -> None:
        """Unmaps the slots."""
        self._memory = None


def _open(slots: Slots) -> NDArray[np.uint8]:
    if len(slots.blob) != _BLOB.size:
        raise InvalidRequest(f"the receiver's slots are described by {len(slots.blob)} bytes, expected {_BLOB.size}")
    process, descriptor, device, inode, size = _BLOB.unpack(slots.blob)
    if size != slots.num_slots * slots.slot_bytes:
        raise InvalidRequest(
            f"the receiver's slots have {size} bytes in all, expected {slots.num_slots} of {slots.slot_bytes} bytes"
        )
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(opened)
            if (status.st_dev, status.st_ino, status.st_size) != (device, inode, size):
                raise Unavailable(f"the receiver's slots are not at {path}")
            return _map(opened, size)
        finally:
            os.close(opened)
    except OSError as error:
        raise Unavailable(f"the receiver's slots cannot be mapped: {error}") from error


def _map(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
