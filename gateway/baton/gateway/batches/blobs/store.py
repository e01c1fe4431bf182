"""The store of large bytes: uploaded files, and the parts and results of batches. Knows only names and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from baton.rpc.errors import NotFound

# A file is read in ranges of this size, so that neither a connection nor memory is held for long.
RANGE_BYTES = 4 << 20


class BlobStore(Protocol):
    """Bytes by name, such as files/file-1. Methods block: call them on a thread. Raises Unavailable on failure."""

    def put(self, name: str, pieces: Iterable[bytes]) -> int:
        """Stores or replaces a blob, which is visible when it is complete and durable. Returns its size."""

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Returns the bytes from `offset`, at most `length`; none at the end. Raises BlobMissing."""

    def delete(self, name: str) -> None:
        """Deletes a blob. Idempotent."""

    def names(self, prefix: str) -> list[str]:
        """Returns the names below a folder, such as batches/batch_1/."""


class BlobMissing(NotFound):
    """The store has no such blob."""


def ranges_of(store: BlobStore, name: str, size: int) -> Iterator[bytes]:
    """Yields a blob of a known size in ranges. Raises BlobMissing."""
    for offset in range(0, size, RANGE_BYTES):
        piece = store.read(name, offset, min(RANGE_BYTES, size - offset))
        if not piece:
            raise BlobMissing(f"the stored bytes of {name} end at {offset} of {size}")
        yield piece
