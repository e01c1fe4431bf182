"""The state of files and batches: records, leases with fences, and which lines are recorded. Knows only bytes.

A batch is run by the holder of its lease. Each lease has a fence, a number that grows: what the holder of an older one
commits is refused, however late it arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.rpc.errors import DataLoss, Mismatch


class LeaseLost(Mismatch):
    """Another gateway has taken the batch over."""


class AlreadyRecorded(DataLoss):
    """A line would be recorded twice."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record's place: its kind, its tenant and its name."""

    kind: str  # "file" or "batch"
    tenant: str
    name: str


@dataclass(frozen=True, slots=True)
class Use:
    """What a file takes of its tenant's storage."""

    size: int  # bytes
    limit: int = 0  # the most bytes of all files of the tenant, with this one; 0: any number


class StorageFull(Exception):
    """A file does not fit into its tenant's storage."""

    def __init__(self, stored: int) -> None:
        super().__init__(f"{stored} bytes are stored")
        self.stored = stored  # bytes of the other files


@dataclass(frozen=True, slots=True)
class Commit:
    """A step of a batch, which is stored completely or not at all."""

    record: bytes
    lines: Sequence[int] = ()  # indices of the lines whose results are in `parts`
    parts: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """What a batch has recorded."""

    bitmap: bytes  # bit 7 of byte 0 is line 0
    parts: Sequence[bytes]

    def has(self, line: int) -> bool:
        """Returns whether the line's result is recorded."""
        byte = line >> 3
        return byte < len(self.bitmap) and bool(self.bitmap[byte] & (0x80 >> (line & 7)))


class StateStore(Protocol):
    """Raises Unavailable if the store cannot be reached."""

    shared: bool  # whether other gateways, and this one after a restart, see the state

    async def create(self, entry: Entry, record: bytes, created: float, expires: float | None) -> None:
        """Stores a record and lists it for its tenant. A batch is opened."""

    async def create_file(self, entry: Entry, record: bytes, created: float, expires: float | None, use: Use) -> None:
        """Stores and lists the record of a file, and counts its bytes. Idempotent. Raises StorageFull."""

    async def stored_bytes(self, tenant: str) -> int:
        """Returns the bytes of the tenant's files."""

    async def load(self, kind: str, names: Sequence[str]) -> list[bytes | None]:
        """Returns records, None where there is none."""

    async def delete(self, entry: Entry) -> bool:
        """Deletes a record and all that belongs to it. Returns whether it existed."""

    async def page(self, kind: str, tenant: str, after: str, limit: int, ascending: bool) -> list[str] | None:
        """Returns names after `after` (empty: from the first) by time of creation. None: `after` is not listed."""

    async def expire(self, entry: Entry, when: float) -> None:
        """Sets when the record expires, in Unix seconds."""

    async def expired(self, now: float, most: int) -> list[Entry]:
        """Returns records that have expired. They stay until they are deleted."""

    async def open_batches(self) -> list[Entry]:
        """Returns the batches that are not closed, oldest first."""

    async def close_batch(self, entry: Entry) -> None:
        """Closes a batch: it is not run again, and forgets its parts and lines."""

    async def lease(self, name: str, seconds: float) -> int | None:
        """Takes a batch that no gateway holds. Returns the lease's fence, or None."""

    async def renew(self, name: str, fence: int, seconds: float) -> None:
        """Extends a lease. Raises LeaseLost."""

    async def release(self, name: str, fence: int) -> None:
        """Ends a lease, so that another gateway may take the batch at once."""

    async def commit(self, name: str, fence: int, commit: Commit) -> None:
        """Stores a step of a batch. Raises LeaseLost, AlreadyRecorded."""

    async def progress(self, name: str) -> Progress:
        """Returns what the batch has recorded."""

    async def cancel(self, name: str, now: float) -> None:
        """Asks the holder to cancel a batch. The first time stays."""

    async def cancelled_at(self, names: Sequence[str]) -> list[float | None]:
        """Returns when the cancelling of batches was asked for, None where it was not."""

    async def close(self) -> None:
        """Closes connections."""
