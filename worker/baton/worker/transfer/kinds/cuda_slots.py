"""Slots in device memory: gathers a piece for a slot, computes a slot's checksum, and scatters a slot into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from baton.rpc.errors import DataLoss, InvalidRequest
from baton.worker.core import BlockId
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.transfer.base import KvConversion, Piece
from baton.worker.transfer.bulk import SlotCopy
from baton.worker.transfer.kinds.cuda_memory import CudaCopy, make_events
from baton.worker.transfer.wire.checksum import checksum_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NUM_PROGRAMS = 96  # of a copy within the device; leaves multiprocessors for copies between devices
_TAKE_SECONDS = 5.0  # for a piece whose copy has started


def is_copied(kv: KvCopies, piece: Piece, conversion: KvConversion | None) -> bool:
    """Returns whether `converted` makes the piece's bytes: the gather kernel has no states, and converts nothing."""
    return conversion is not None or kv.holds_states(piece.layer)


def converted(kv: KvCopies, piece: Piece, conversion: KvConversion | None) -> Tensor:
    """Queues a gather in the receiver's layout on the current stream. Returns [num_bytes] uint8.

    States have the order of their matrices, not of their pages: any two layouts agree on it.
    """
    layers = range(piece.layer, piece.layer + piece.num_layers)
    if conversion is None or kv.holds_states(piece.layer):
        return kv.read_states(layers, piece.block_ids)
    memory = torch.empty(kv.num_bytes(piece.num_layers, len(piece.block_ids)), dtype=torch.uint8, device=kv.device)
    values = conversion.on_device(kv.gather(layers, piece.block_ids, memory), piece)
    return values.contiguous().view(-1).view(torch.uint8)


def gathered(kv: KvCopies, piece: Piece, conversion: KvConversion | None, staging: Tensor) -> Tensor:
    """Queues a gather in the receiver's layout. Returns [num_bytes] uint8, in `staging` if there is no conversion."""
    if conversion is not None:
        return converted(kv, piece, conversion)
    num_bytes = kv.num_bytes(piece.num_layers, len(piece.block_ids))
    if num_bytes > staging.numel():
        raise InvalidRequest(f"a piece has {num_bytes} bytes; the receiver's slots have {staging.numel()}")
    kv.gather(range(piece.layer, piece.layer + piece.num_layers), piece.block_ids, staging[:num_bytes])
    return staging[:num_bytes]


class StagedPieces:
    """A sender's staging memory, one part for each slot. Gathers on a stream of its own."""

    def __init__(self, kv: KvCopies, num_slots: int, slot_bytes: int, moving: torch.cuda.Stream) -> None:
        """`moving`: the stream that moves pieces out of the staging memory."""
        self._kv = kv
        self._slot_bytes = slot_bytes
        self._moving = moving
        self._lane = kv.lane(num_slots, slot_bytes)
        self._memory = torch.empty(num_slots * slot_bytes, dtype=torch.uint8, device=kv.device)
        self._gathering = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]
        self._raw_stream = int(self._gathering.cuda_stream)
        self.address: int = self._memory.data_ptr()  # of slot 0's part
        self._gathered = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def gather(self, piece: Piece, slot: int, conversion: KvConversion | None) -> tuple[int, int]:
        """Queues a gather.

        Returns the address and the number of its bytes, valid on `moving`. Raises InvalidRequest.
        """
        start = slot * self._slot_bytes
        if not is_copied(self._kv, piece, conversion):
            address = self.address + start
            layers = range(piece.layer, piece.layer + piece.num_layers)
            num_bytes = self._lane.gather(slot, layers, piece.block_ids, address, self._raw_stream, _NUM_PROGRAMS)
        else:
            with torch.cuda.stream(self._gathering):
                values = converted(self._kv, piece, conversion)
                values.record_stream(self._moving)
            address, num_bytes = values.data_ptr(), values.numel()
        self._gathered.record(self._gathering)
        self._moving.wait_event(self._gathered)
        return address, num_bytes


class _Written:
    """A write that follows the arrival of a peer's bytes. Ends when they have arrived, or by `abort`.

    `damaged`: in pinned memory, whether states hold NaN, once the write has ended.
    """

    def __init__(self, slots: DeviceSlots, pending: CudaCopy, layers: range, damaged: Tensor | None = None) -> None:
        self._slots = slots
        self._pending = pending
        self._layers = layers
        self._damaged = damaged

    def done(self) -> bool:
        """Returns whether the write has ended. Raises DataLoss if the wait for the bytes was aborted, or for NaN in a
        state."""
        return self._checked(self._pending.done())

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds` and returns `done`."""
        return self._checked(self._pending.wait(seconds))

    def _checked(self, done: bool) -> bool:
        if done and self._slots.aborted:
            raise DataLoss("the connection was cut before a piece arrived")
        if done and self._damaged is not None and bool(self._damaged):
            raise DataLoss(
                f"a state of KV layers {self._layers.start} to {self._layers.stop - 1} from another worker holds NaN"
            )
        return done


class DeviceSlots:
    """One sender's slots in device memory, as in BulkReceiver. `_stream` runs what follows each piece's arrival."""

    writes_ahead = True

    def __init__(self, kv: KvCopies, memory: Tensor, slot_bytes: int) -> None:
        self._kv = kv
        self._lane = kv.lane(memory.numel() // slot_bytes, slot_bytes)
        self._memory = memory  # uint8
        self._slot_bytes = slot_bytes
        self._stream = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]
        self._raw_stream = int(self._stream.cuda_stream)
        self._address: int = memory.data_ptr()
        self._events = make_events(memory.numel() // slot_bytes, self._stream)
        self.aborted = False  # awaited bytes may not have arrived

    def take(self, slot: int, num_bytes: int) -> None:
        """Waits until the piece is in its slot. Raises DataLoss after a timeout, or if the sender is gone."""
        self._come_after(slot)
        if not CudaCopy(self._stream).wait(_TAKE_SECONDS) or self.aborted:
            self.abort()
            raise DataLoss(f"an announced piece did not arrive in {_TAKE_SECONDS:g} s")

    def _come_after(self, slot: int) -> None:
        """Makes the stream wait for the bytes that were announced for the slot. Raises DataLoss.

        Does not wait for later pieces: the sender may wait for this slot. Here it does nothing: announced bytes are
        there.
        """

    def abort(self) -> None:
        """Ends all waits."""
        self.aborted = True

    def checksum(self, slot: int, num_bytes: int) -> int:
        """Copies the slot to the host and returns its checksum."""
        with torch.cuda.stream(self._stream):
            start = self._address_of(slot, num_bytes) - self._address
            values = cast("NDArray[np.uint8]", self._memory[start : start + num_bytes].cpu().numpy())
        return checksum_of(values.data)

    def write(self, slot: int, layers: range, block_ids: Sequence[BlockId], heads: tuple[int, int] | None) -> SlotCopy:
        """Starts to scatter the slot. Raises DataLoss, and InvalidRequest for some of the heads: a GPU holds all."""
        if heads is not None:
            raise InvalidRequest(f"a piece covers KV heads {heads} (first, number); it must cover all", field="heads")
        self._come_after(slot)
        if self._kv.holds_states(layers.start):
            return self._write_states(slot, layers, block_ids)
        self._kv.order(self._stream)
        self._lane.scatter(slot, layers, block_ids, self._address_of(slot, 0), self._raw_stream, _NUM_PROGRAMS)
        return _Written(self, CudaCopy(self._stream, event=self._events[slot]), layers)

    def _write_states(self, slot: int, layers: range, pages: Sequence[BlockId]) -> SlotCopy:
        damaged = torch.empty((), dtype=torch.bool, pin_memory=True)
        start, num_bytes = slot * self._slot_bytes, self._kv.num_state_bytes(layers, pages)
        with torch.cuda.stream(self._stream):
            found = self._kv.write_states(layers, pages, self._memory[start : start + num_bytes])
            damaged.copy_(found, non_blocking=True)
        return _Written(self, CudaCopy(self._stream, event=self._events[slot]), layers, damaged)

    def _address_of(self, slot: int, num_bytes: int) -> int:
        """Returns the address of a slot. Raises InvalidRequest if it is too small."""
        if num_bytes > self._slot_bytes:
            raise InvalidRequest(f"{num_bytes} bytes in a slot of {self._slot_bytes}")
        return self._address + slot * self._slot_bytes
