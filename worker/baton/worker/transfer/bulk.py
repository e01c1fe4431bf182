"""What carries the bytes of pieces beside the connection that announces them: slots of memory at the receiver.

A connection between two workers carries headers, credits and, under tcp, the bytes. Every other transport gives the
connection a bulk path: the receiver sets a few slots of staging memory aside for this one sender, the sender fills a
slot and announces it, the receiver copies the slot into its pool and gives it back. The pool itself is written by the
receiver alone, so a peer that cannot be stopped can spoil no more than its own slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.worker.core import BlockId
from baton.worker.transfer.base import KvConversion, Piece


@dataclass(frozen=True, slots=True)
class Slots:
    """A receiver's staging for one sender."""

    num_slots: int
    slot_bytes: int
    blob: bytes  # how the sender reaches it; the transport's own words, never pickled


class SlotCopy(Protocol):
    """One copy that was started."""

    def done(self) -> bool:
        """Whether it has ended. Raises what the copy raised."""

    def wait(self, seconds: float) -> bool:
        """`done`, after at most so long. Holds no lock of the interpreter's while it waits."""


def has_ended(pending: SlotCopy) -> bool:
    """Whether `wait` returns, or raises, at once."""
    try:
        return pending.done()
    except Exception:  # told where it is waited for
        return True


class EndedCopy:
    """What has ended already."""

    def done(self) -> bool:
        """It has."""
        return True

    def wait(self, seconds: float) -> bool:
        """Not at all."""
        return True


Announce = Callable[[], None]


def no_announcement() -> None:
    """An Announce for a piece that somebody else announces, or nobody."""


class BulkSender(Protocol):
    """The sender's end of one connection. Called by one thread at a time, but for `abort`."""

    announces_first: bool  # pieces are announced by `put`, which only queues them; else when their copy has ended

    def put(self, piece: Piece, slot: int, conversion: KvConversion | None, announce: Announce) -> SlotCopy:
        """Starts to gather the piece's blocks, in the receiver's layout, and to move them into its slot.

        Calls `announce`, where `announces_first`, as soon as the receiver may hear of the piece; it raises nothing.

        The slot holds the piece: no connection stands whose slots are smaller than the sender's largest piece.
        """

    def abort(self) -> None:
        """Makes every copy that was started end soon, well or badly. From any thread. Idempotent."""

    def close(self) -> None:
        """After the last copy ended: gives everything back. Idempotent."""


class BulkReceiver(Protocol):
    """The receiver's end of one connection. Belongs to the connection's thread, but for `abort`."""

    slots: Slots
    writes_ahead: bool  # `write` may come before the bytes: the device does one after the other

    def announced(self, slot: int, num_bytes: int) -> None:
        """So many bytes come into this slot, in the order of these calls. Does not wait for them.

        Raises DataLoss where they cannot come. One-sided transports have nothing to do.
        """

    def take(self, slot: int, num_bytes: int) -> None:
        """The slot's bytes, which were announced, are there when this returns.

        Raises DataLoss when they do not come. One-sided transports have nothing to do.
        """

    def checksum(self, slot: int, num_bytes: int) -> int:
        """Of the slot's bytes, as frames have it. May copy them to the host."""

    def write(self, slot: int, layers: range, block_ids: Sequence[BlockId], heads: tuple[int, int] | None) -> SlotCopy:
        """Begins to copy the slot, [blocks, layers, bytes], into these blocks of the pool."""

    def abort(self) -> None:
        """Makes `take` end soon. From any thread. Idempotent."""

    def close(self, sender_gone: bool) -> None:
        """The slots may serve another sender: at once where the sender's end of the connection is closed, which says
        that its copies have ended; never before that where it is not (`sender_gone` false). Idempotent."""


class BulkPath(Protocol):
    """One bulk transport of one worker. Thread-safe."""

    def offer(self) -> bytes:
        """What a sender says of itself when it connects: few bytes, as a host's identity, or none."""

    def accept(self, offer: bytes) -> BulkReceiver:
        """The receiver's end for a sender that offered this. Raises a ServiceError where it cannot be served."""

    def connect(self, slots: Slots) -> BulkSender:
        """The sender's end, to the slots that the receiver answered. Raises a ServiceError where they are of no use."""

    def close(self) -> None:
        """Frees all slots. Idempotent."""
