"""The interface of an executor's adapters: reading them to host memory, and copying them to slots of the device."""

from __future__ import annotations

from typing import Protocol


class HostAdapter(Protocol):
    """An adapter in host memory."""

    @property
    def digest(self) -> bytes:
        """Digest of the scales and weights, 16 bytes."""

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""

    @property
    def num_bytes(self) -> int:
        """Size of its tensors."""


class AdapterMemory(Protocol):
    """The adapters of an executor. Both methods may run on any thread, beside steps."""

    @property
    def num_slots(self) -> int:
        """Adapters that the device holds."""

    def digest(self, path: str) -> bytes:
        """Returns the digest of a folder's adapter, which it opens. Raises a ServiceError as `read`."""

    def read(self, path: str) -> HostAdapter:
        """Reads a folder's adapter and checks it against the base. Raises a ServiceError that names what is wrong."""

    def write(self, slot: int, adapter: HostAdapter) -> None:
        """Copies an adapter that `read` returned to a slot that no row uses."""
