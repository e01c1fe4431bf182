"""Bulk paths: slots of memory at the receiver that hold the bytes of pieces which the connection announces.

A connection between two workers carries headers, credits and, under tcp, the bytes. Every other transport gives the
connection a bulk path: the receiver reserves a few slots of staging memory for this one sender, the sender fills a slot
and announces it, and the receiver copies the slot into its pool and returns it. Only the receiver writes the pool, so a
peer that cannot be stopped corrupts no more than its own slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.worker.core import BlockId
from baton.worker.transfer.base import KvConversion, Piece


@dataclass(frozen=True, slots=True)
class Slots:
    """A receiver's staging memory for one sender."""

    num_slots: int
    slot_bytes: int
    blob: bytes  # how the sender reaches the slots, in the transport's own encoding; never pickled


class SlotCopy(Protocol):
    """A copy into or out of a slot that was started."""

    def done(self) -> bool:
        """Returns whether the copy has ended. Raises the copy's error."""

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds`, without the GIL, and returns `done`."""


def has_ended(pending: SlotCopy) -> bool:
    """Returns whether `wait` returns or raises at once."""
    try:
        return pending.done()
    except Exception:  # raised again by `wait`
        return True


class EndedCopy:
    """A copy that ended before it was returned."""

    def done(self) -> bool:
        return True

    def wait(self, seconds: float) -> bool:
        return True


Announce = Callable[[], None]


def no_announcement() -> None:
    """Does nothing: the piece is announced elsewhere, or not at all."""


class BulkSender(Protocol):
    """The sender's end of one connection. One thread at a time calls it; `abort` may come from any."""

    announces_first: bool  # `put` announces a piece and queues it; else it is announced when its copy has ended

    def put(self, piece: Piece, slot: int, conversion: KvConversion | None, announce: Announce) -> SlotCopy:
        """Starts to gather the piece's blocks, in the receiver's layout, and to move them into its slot.

        If `announces_first`, calls `announce` as soon as the receiver may learn of the piece. `announce` does not
        raise.

        The piece fits: a connection whose slots are smaller than the sender's largest piece is never opened.
        """

    def abort(self) -> None:
        """Makes every started copy end soon, successfully or not. For any thread. Idempotent."""

    def close(self) -> None:
        """Frees everything. Call after the last copy has ended. Idempotent."""


class BulkReceiver(Protocol):
    """The receiver's end of one connection. The connection's thread calls it; `abort` may come from any."""

    slots: Slots
    writes_ahead: bool  # `write` may be called before the bytes arrive: the device orders the two

    def announced(self, slot: int, num_bytes: int) -> None:
        """Expects `num_bytes` in this slot, in the order of these calls. Does not wait for them.

        Raises DataLoss if they cannot arrive. One-sided transports do nothing.
        """

    def take(self, slot: int, num_bytes: int) -> None:
        """Waits until the announced bytes are in the slot.

        Raises DataLoss if they do not arrive. One-sided transports do nothing.
        """

    def checksum(self, slot: int, num_bytes: int) -> int:
        """Returns the checksum of the slot's bytes, as in piece headers. May copy them to the host."""

    def write(self, slot: int, layers: range, block_ids: Sequence[BlockId], heads: tuple[int, int] | None) -> SlotCopy:
        """Starts to copy the slot, [blocks, layers, bytes], into these blocks of the pool."""

    def abort(self) -> None:
        """Makes `take` end soon. For any thread. Idempotent."""

    def close(self, sender_gone: bool) -> None:
        """Releases the slots. Idempotent.

        `sender_gone`: the sender has closed its end, so its copies have ended, and the slots may serve another sender
        at once. Else they must not be reused while this sender may still write.
        """


class BulkPath(Protocol):
    """One bulk transport of one worker. Thread-safe."""

    def offer(self) -> bytes:
        """Returns what the sender sends when it connects: a few bytes, such as a host's identity, or none."""

    def accept(self, offer: bytes) -> BulkReceiver:
        """Returns the receiver's end for a sender with this offer. Raises a ServiceError if it cannot be served."""

    def connect(self, slots: Slots) -> BulkSender:
        """Returns the sender's end, for the slots in the receiver's welcome.

        Raises a ServiceError if it cannot use them.
        """

    def close(self) -> None:
        """Frees all slots. Idempotent."""
