"""NCCL between two workers on one host or two: one communicator for each connection, made at its first use.

Both ends take part: a piece is announced just before its send is queued, and the receiver then queues the receive. An
end that loses the other aborts its communicator, which ends waiting kernels. The next connection makes a new one.
"""

from __future__ import annotations

import logging
import threading

import torch

from baton.rpc.errors import DataLoss, DeadlineExceeded, InvalidRequest, NoCapacity, ServiceError
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.transfer.base import KvConversion, Piece
from baton.worker.transfer.bulk import Announce, Slots, no_announcement
from baton.worker.transfer.kinds.cuda_memory import CudaCopy, make_events
from baton.worker.transfer.kinds.cuda_slots import DeviceSlots, StagedPieces
from baton.worker.transfer.kinds.nccl.pair import CONNECT_SECONDS, ID_BYTES, Pair, load_kernels

_log = logging.getLogger(__name__)

NUM_SLOTS = 3
_MAX_COMMUNICATORS = 16
_SOONER = -1  # stream priority above copies within the device, which have time until the next piece


class _Seats:
    """Limits the number of communicators."""

    def __init__(self, count: int) -> None:
        self._count = self._free = count
        self._changed = threading.Condition()

    def wait_until_free(self, seconds: float) -> bool:
        """Waits at most `seconds` until no communicator is left. Returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._free == self._count, seconds)

    def pair(self, unique_id: bytes | None, rank: int) -> Pair:
        """Makes a pair, which counts until it has ended. Raises NoCapacity."""
        with self._changed:
            if not self._free:
                raise NoCapacity(f"{self._count} NCCL communicators are open, the maximum")
            self._free -= 1
        try:
            return Pair(unique_id, rank, self._give_back)
        except BaseException:
            self._give_back()
            raise

    def _give_back(self) -> None:
        with self._changed:
            self._free += 1
            self._changed.notify_all()


class NcclPath:
    """Implements BulkPath."""

    def __init__(self, kv: KvCopies, slot_bytes: int) -> None:
        self._kv = kv
        self._slot_bytes = slot_bytes
        self._seats = _Seats(_MAX_COMMUNICATORS)
        kv.warm_up()
        load_kernels()

    def offer(self) -> bytes:
        """Returns nothing. An id that no receiver used would leave an NCCL thread behind, which waits for two ranks."""
        return b""

    def accept(self, offer: bytes) -> NcclReceiver:
        """Starts to make the communicator without waiting for the other end. Raises NoCapacity."""
        pair = self._seats.pair(None, rank=1)
        try:
            return NcclReceiver(self._kv, self._slot_bytes, pair)
        except BaseException:
            pair.abort()
            raise

    def connect(self, slots: Slots) -> NcclSender:
        """Waits until both ends have met. Raises DeadlineExceeded, Unavailable, NoCapacity, or InvalidRequest."""
        if len(slots.blob) != ID_BYTES:
            raise InvalidRequest(f"the receiver's communicator id has {len(slots.blob)} bytes, expected {ID_BYTES}")
        pair = self._seats.pair(slots.blob, rank=0)
        try:
            return NcclSender(self._kv, slots, pair)
        except BaseException:
            pair.abort()
            raise

    def close(self) -> None:
        """Waits until the communicators have ended: their libraries are unloaded with the process."""
        if not self._seats.wait_until_free(CONNECT_SECONDS):
            _log.error("NCCL communicators did not end in %g s", CONNECT_SECONDS)


class NcclReceiver(DeviceSlots):
    """Implements BulkReceiver."""

    def __init__(self, kv: KvCopies, slot_bytes: int, pair: Pair) -> None:
        memory = torch.empty(NUM_SLOTS * slot_bytes, dtype=torch.uint8, device=kv.device)
        super().__init__(kv, memory, slot_bytes)
        self._receiving = torch.cuda.Stream(kv.device, priority=_SOONER)  # type: ignore[no-untyped-call]
        self._raw_receiving = int(self._receiving.cuda_stream)
        self._received = make_events(NUM_SLOTS, self._receiving)
        self._pair = pair
        self._problem = "the sender did not join the communicator in time"
        self._meeting = threading.Thread(target=self._meet, name="nccl-meet", daemon=True)
        self._meeting.start()
        self.slots = Slots(NUM_SLOTS, slot_bytes, pair.unique_id)

    def announced(self, slot: int, num_bytes: int) -> None:
        """Queues the receive. Raises DataLoss if the sender is gone."""
        self._meeting.join(CONNECT_SECONDS)
        if self._problem:
            raise DataLoss(f"a piece could not be received: {self._problem}")
        try:
            self._pair.move(self._address_of(slot, num_bytes), num_bytes, self._raw_receiving)
        except ServiceError as error:
            raise DataLoss(f"a piece could not be received: {error.message}") from error
        self._received[slot].record(self._receiving)

    def abort(self) -> None:
        """Ends a waiting receive."""
        super().abort()
        self._pair.abort()

    def close(self, sender_gone: bool) -> None:
        """Frees the slots when no receive is left. Only this process writes them."""
        self.abort()
        self._meeting.join(CONNECT_SECONDS)
        self._receiving.synchronize()

    def _come_after(self, slot: int) -> None:
        self._stream.wait_event(self._received[slot])

    def _meet(self) -> None:
        try:
            _meet(self._pair, self._address, self._receiving)
        except ServiceError as error:
            self._problem = error.message
        else:
            self._problem = ""


class NcclSender:
    """Implements BulkSender."""

    announces_first = True

    def __init__(self, kv: KvCopies, slots: Slots, pair: Pair) -> None:
        self._sending = torch.cuda.Stream(kv.device, priority=_SOONER)  # type: ignore[no-untyped-call]
        self._raw_stream = int(self._sending.cuda_stream)
        self._staged = StagedPieces(kv, slots.num_slots, slots.slot_bytes, self._sending)
        self._events = make_events(slots.num_slots, self._sending)
        self._pair = pair
        _meet(pair, self._staged.address, self._sending)

    def put(
        self, piece: Piece, slot: int, conversion: KvConversion | None, announce: Announce = no_announcement
    ) -> CudaCopy:
        """Gathers on one stream while the previous piece is sent on the other."""
        announce()
        self._pair.move(*self._staged.gather(piece, slot, conversion), self._raw_stream)
        return CudaCopy(self._sending, event=self._events[slot])

    def abort(self) -> None:
        """Ends a send that waits for its receive."""
        self._pair.abort()

    def close(self) -> None:
        """Ends the communicator. Call after the last piece, or after `abort`."""
        self._pair.abort()
        self._sending.synchronize()


def _meet(pair: Pair, address: int, stream: torch.cuda.Stream) -> None:
    """Joins the communicator, moves its first byte, and ends the first communicator.

    Raises DeadlineExceeded or Unavailable.
    """
    pair.meet(address, int(stream.cuda_stream), CONNECT_SECONDS)
    if not CudaCopy(stream).wait(CONNECT_SECONDS):
        raise DeadlineExceeded("the other end joined the NCCL communicator, but its first byte did not arrive")
    pair.leave_meeting(CONNECT_SECONDS)
