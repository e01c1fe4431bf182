"""CUDA IPC: a sender of the same host writes straight into its slots of the receiver's device memory.

One kernel gathers a piece's blocks into the slot, over NVLink and without staging. One program for each of an H200's
multiprocessors reaches 90 % of what one large copy does, and leaves most of each to the model. Behind each piece the
sender counts the slot's pieces up, which a stream of the receiver's waits for.
"""

from __future__ import annotations

import threading

import torch

from baton.rpc.errors import InvalidRequest, Mismatch, ServiceError
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.transfer.base import KvConversion, Piece
from baton.worker.transfer.bulk import Announce, Slots, no_announcement
from baton.worker.transfer.kinds.cuda_memory import HANDLE_BYTES, CudaCopy, DeviceMemory, PeerMemory, make_events
from baton.worker.transfer.kinds.cuda_slots import DeviceSlots, converted
from baton.worker.transfer.kinds.ipc.counters import Counters, counter_bytes
from baton.worker.transfer.kinds.ipc.regions import Regions

NUM_SLOTS = 3
_MAX_SENDERS = 16
_NUM_PROGRAMS = 132  # of a gather: NVLink is full with them, at 8 warps and 32 KiB each


class IpcPath:
    """A BulkPath. `host` names the host as all its processes see it."""

    def __init__(self, kv: KvCopies, slot_bytes: int, host: bytes) -> None:
        self._kv = kv
        self._slot_bytes = slot_bytes
        self._host = host
        self._regions = Regions(NUM_SLOTS * slot_bytes + counter_bytes(NUM_SLOTS), _MAX_SENDERS)
        kv.warm_up()

    def offer(self) -> bytes:
        """The host's name."""
        return self._host

    def accept(self, offer: bytes) -> IpcReceiver:
        """Raises Mismatch for a sender of another host, NoCapacity for one too many."""
        if offer != self._host:
            raise Mismatch("ipc needs both workers on one host; the sender is on another")
        return IpcReceiver(self._kv, self._regions, self._slot_bytes)

    def connect(self, slots: Slots) -> IpcSender:
        """Raises InvalidRequest or InternalError where the slots cannot be reached."""
        if len(slots.blob) != HANDLE_BYTES:
            raise InvalidRequest(f"the receiver's memory handle has {len(slots.blob)} bytes, expected {HANDLE_BYTES}")
        return IpcSender(self._kv, slots)

    def close(self) -> None:
        """Frees the slots that nobody uses."""
        self._regions.close()


class IpcReceiver(DeviceSlots):
    """A BulkReceiver. Behind the slots are their counters."""

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
        self._lock = threading.Lock()  # of the region, against abort
        self.slots = Slots(NUM_SLOTS, slot_bytes, region.handle())

    def announced(self, slot: int, num_bytes: int) -> None:
        """It is counted."""
        self._counters.expect(slot)

    def _come_after(self, slot: int) -> None:
        self._counters.wait(slot, self._raw_stream)

    def abort(self) -> None:
        """What waits for a counter goes on."""
        with self._lock:
            if self._region is not None and not self.aborted:
                super().abort()
                with torch.cuda.device(self._stream.device):
                    self._counters.release(int(self._releasing.cuda_stream))

    def close(self, sender_gone: bool) -> None:
        """Without the sender's end the region stays with it."""
        self.abort()
        self._stream.synchronize()
        self._releasing.synchronize()
        with self._lock:
            region, self._region = self._region, None
        if sender_gone and region is not None:
            self._regions.give_back(region)


class IpcSender:
    """A BulkSender. Only what must be converted is gathered here first."""

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
        """One launch: blocks of ours into the peer's slot. Then its count."""
        offset = slot * self._slot_bytes
        if conversion is None:
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
        """Copies between devices end by themselves."""

    def close(self) -> None:
        """After the last copy."""
        self._writing.synchronize()
        self._peer.close()
