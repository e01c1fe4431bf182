"""A kind of transport: how a worker makes its end, and where it may be used. Transports of plugins are these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from baton.worker.executors.base import Executor
from baton.worker.transfer.bulk import BulkPath

if TYPE_CHECKING:
    from baton.worker.executors.cuda.kv.copies import KvCopies

# Of the executor, the bytes that a slot must hold, and the KV of a CUDA device (None: the blocks are in host memory).
MakePath: TypeAlias = "Callable[[Executor, int, KvCopies | None], BulkPath | None]"


@dataclass(frozen=True, slots=True)
class TransportKind:
    """One kind. `make` raises Unsupported, or ImportError, on a machine that cannot use it.

    It returns None for a kind whose bytes follow their header on the connection, as those of tcp.
    """

    make: MakePath
    is_private: bool = False  # its bytes are encrypted, or never leave the host: it may be used under TLS
    is_automatic_on_host: bool = True  # transports=auto tries it where blocks are in host memory
