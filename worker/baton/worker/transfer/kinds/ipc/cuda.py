"""CUDA IPC: a sender on the same host writes into its slots of the receiver's device memory.

One kernel gathers a piece's blocks into the slot, over NVLink and without staging. With one program for each of an
H200's multiprocessors it reaches 90 % of the speed of one large copy, and leaves most of each to the model. After each
piece the sender increments the slot's counter, for which a stream of the receiver waits.
"""

from __future__ import annotations

import threading

import torch

from baton.rpc.errors import InvalidRequest, Mismatch, ServiceError
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.transfer.base import KvConversion, Piece
from baton.worker.transfer.bulk import Announce, Slots, no_announcement
from baton.worker.transfer.kinds.cuda_memory import HANDLE_BYTES, CudaCopy, DeviceMemory, PeerMemory, make_events
from baton.worker.transfer.kinds.cuda_slots import DeviceSlots, converted, is_copied
from baton.worker.transfer.kinds.ipc.counters import Counters, counter_bytes
from baton.worker.transfer.kinds.ipc.regions import Regions

NUM_SLOTS = 3
_MAX_SENDERS = 16
_NUM_PROGRAMS = 132  # of a gather; enough to saturate NVLink, with 8 warps and 32 KiB each


class IpcPath:
    """A BulkPath. `host` is the host's identity, the same in all its processes."""

    def __init__(self, kv: KvCopies, slot_bytes: int, host: bytes) -> None:
        self._kv = kv
        self._slot_bytes = slot_bytes
        self._host = host
        self._regions = Regions(NUM_SLOTS * slot_bytes + counter_bytes(NUM_SLOTS), _MAX_SENDERS)
        kv.warm_up()

    def offer(self) -> bytes:
        """Returns the host's identity."""
        return self._host

    def accept(self, offer: bytes) -> IpcReceiver:
        """Returns the receiver's end. Raises Mismatch for a sender of another host, NoCapacity above the limit."""
        if offer != self._host:
            raise Mismatch("ipc needs both workers on one host; the sender is on another")
        return IpcReceiver(self._kv, self._regions, self._slot_bytes)

    def connect(self, slots: Slots) -> IpcSender:
        """Returns the sender's end. Raises InvalidRequest or InternalError if the slots cannot be mapped."""
        if len(slots.blob) != HANDLE_BYTES:
            raise InvalidRequest(f"the receiver's memory handle has {len(slots.blob)} bytes, expected {HANDLE_BYTES}")
        return IpcSender(self._kv, slots)

    def close(self) -> None:
        """Frees the slots that no sender uses."""
        self._regions.close()


class IpcReceiver(DeviceSlots):
    """A BulkReceiver. The counters follow the slots in memory."""

    def __init__(self, kv: KvCopies, regions: Regions, slot_bytes: int) -> None:
        self._regions = regions
        region = regions.take()
        super().__init__(kv, region.tensor[: NUM_SLOTS * slot_bytes], slot_bytes)
        self._region: DeviceMemory | None = region
        self._counters = Counters(region.address + NUM_SLOTS * slot_bytes, NUM_SLOTS)
        try:
            self._counters.clear(self._raw_stream)
        except ServiceError:
            regions.give_back(region)
            raise
        self._stream.synchronize()
        self._releasing = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()  # guards the region against `abort`
        self.slots = Slots(NUM_SLOTS, slot_bytes, region.handle())

    def announced(self, slot: int, num_bytes: int) -> None:
        """Expects one more piece in the slot."""
        self._counters.expect(slot)

    def _come_after(self, slot: int) -> None:
        self._counters.wait(slot, self._raw_stream)

    def abort(self) -> None:
        """Releases the stream's waits for counters."""
        with self._lock:
            if self._region is not None and not self.aborted:
                super().abort()
                with torch.cuda.device(self._stream.device):
                    self._counters.release(int(self._releasing.cuda_stream))

    def close(self, sender_gone: bool) -> None:
        """Frees the region if the sender is gone; else this sender keeps it."""
        self.abort()
        self._stream.synchronize()
        self._releasing.synchronize()
        with self._lock:
            region, self._region = self._region, None
        if sender_gone and region is not None:
            self._regions.give_back(region)


class IpcSender:
    """A BulkSender. Gathers into staging memory only if a piece is_copied."""

    announces_first = True

    def __init__(self, kv: KvCopies, slots: Slots) -> None:
        self._kv = kv
        self._slot_bytes = slots.slot_bytes
        self._lane = kv.lane(slots.num_slots, slots.slot_bytes)
        self._writing = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]
        self._raw_stream = int(self._writing.cuda_stream)
        self._peer = PeerMemory(slots.blob)
        self._events = make_events(slots.num_slots, self._writing)
        self._counters = Counters(self._peer.address + slots.num_slots * slots.slot_bytes, slots.num_slots)

    def put(
        self, piece: Piece, slot: int, conversion: KvConversion | None, announce: Announce = no_announcement
    ) -> CudaCopy:
        """Queues one gather into the peer's slot, then the increment of its counter."""
        offset = slot * self._slot_bytes
        if not is_copied(self._kv, piece, conversion):
            layers = range(piece.layer, piece.layer + piece.num_layers)
            to = self._peer.address + offset
            self._lane.gather(slot, layers, piece.block_ids, to, self._raw_stream, _NUM_PROGRAMS)
        else:
            with torch.cuda.stream(self._writing):
                values = converted(self._kv, piece, conversion)
                self._peer.copy_in(offset, values.data_ptr(), values.numel(), self._raw_stream)
        announce()
        self._counters.count(slot, self._raw_stream)
        return CudaCopy(self._writing, ends=True, event=self._events[slot])

    def abort(self) -> None:
        """Does nothing: copies between devices end by themselves."""

    def close(self) -> None:
        """Closes the slots. Call after the last copy."""
        self._writing.synchronize()
        self._peer.close()
