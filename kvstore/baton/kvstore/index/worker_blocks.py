"""One worker's cached blocks: a snapshot, and the event batches after it. Knows no stream.

Readers are sent and the store keeps the same encoded bytes, so an event costs no work per block. When the batches
outgrow the snapshot they are folded into a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.kvstore.index.packed_blocks import Homes, changes_of, check_change, encode_parts, fold, join_parts
from baton.rpc.block_hash import HASH_BYTES
from baton.rpc.errors import InvalidRequest
from baton.v1 import kv_pb2

_MIN_LOG_BYTES = 1 << 20
_KEPT_LOG_BYTES = 256 << 10  # batches kept from before the barrier, for readers that are slightly behind


@dataclass(frozen=True, slots=True)
class Base:
    """A worker's blocks after the batch `barrier`, as encoded KvSnapshots."""

    barrier: int
    parts: tuple[bytes, ...]
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        """Size of the encoded parts."""
        return sum(map(len, self.parts))


class WorkerBlocks:
    """The blocks of `worker_id` in `epoch`, up to and including `sequence`."""

    def __init__(self, worker_id: str, epoch: int, barrier: int, homes: Homes | None = None) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.sequence = barrier
        self.is_silent = False  # its lease ended: readers keep its entries but ignore them
        self.base = make_base(worker_id, epoch, barrier, homes or {})
        self.log_bytes = 0  # size of the batches after the barrier
        self._log: list[bytes] = []  # encoded batches, up to `sequence`
        self._num_blocks = self.base.num_blocks

    @classmethod
    def from_parts(cls, parts: Sequence[kv_pb2.KvSnapshot]) -> WorkerBlocks:
        """Returns the blocks of a complete snapshot. Raises InvalidRequest for a malformed part."""
        return cls(parts[0].worker_id, parts[0].epoch, parts[0].barrier, join_parts(parts))

    def __len__(self) -> int:
        """Returns the number of blocks over all tiers. Exact if the worker never stores a block twice."""
        return self._num_blocks

    @property
    def is_log_long(self) -> bool:
        """Whether the log should be compacted."""
        return self.log_bytes > max(_MIN_LOG_BYTES, self.base.num_bytes)

    def follows(self, batch: kv_pb2.KvEventBatch) -> bool:
        """Returns whether the batch is the next one."""
        return batch.epoch == self.epoch and batch.sequence == self.sequence + 1

    def has(self, batch: kv_pb2.KvEventBatch) -> bool:
        """Returns whether the batch was applied before."""
        return batch.epoch == self.epoch and batch.sequence <= self.sequence

    def apply(self, batch: kv_pb2.KvEventBatch, encoded: bytes) -> int:
        """Applies the next batch and returns its number of block events. Raises InvalidRequest if it is malformed."""
        assert self.follows(batch)
        num_events = growth = 0
        for is_store, change in changes_of(batch):
            num_blocks = check_change(change)
            num_events += num_blocks
            growth += num_blocks if is_store else -num_blocks
        self._num_blocks += growth
        self._log.append(encoded)
        self.log_bytes += len(encoded)
        self.sequence = batch.sequence
        return num_events

    def since(self, sequence: int) -> Sequence[bytes] | None:
        """Returns the encoded batches after `sequence`, or None if some are not kept any more."""
        missing = max(0, self.sequence - sequence)
        if missing > len(self._log):
            return None
        return self._log[len(self._log) - missing :]

    def homes(self) -> Homes:
        """Returns all blocks, by home."""
        return fold_base(self.base, self._log[len(self._log) - (self.sequence - self.base.barrier) :])

    def compaction(self) -> Callable[[], Base]:
        """Makes a base of the blocks as they are now. It takes a while for millions, may run in a thread, and changes
        nothing here."""
        base, log, sequence = (
            self.base,
            self._log[len(self._log) - (self.sequence - self.base.barrier) :],
            self.sequence,
        )
        return lambda: make_base(self.worker_id, self.epoch, sequence, fold_base(base, log))

    def rebase(self, base: Base) -> None:
        """Takes a base that `compaction` made. Keeps some batches before it."""
        assert self.base.barrier <= base.barrier <= self.sequence
        after = self.sequence - base.barrier
        self.log_bytes = sum(map(len, self._log[len(self._log) - after :]))
        kept, size = after, 0
        while kept < len(self._log) and size < _KEPT_LOG_BYTES:
            kept += 1
            size += len(self._log[-kept])
        del self._log[: len(self._log) - kept]
        self.base = base
        self._num_blocks = base.num_blocks + sum(map(_growth, self.since(base.barrier) or ()))


def make_base(worker_id: str, epoch: int, barrier: int, homes: Homes) -> Base:
    num_blocks = sum(map(len, homes.values())) // HASH_BYTES
    return Base(barrier, encode_parts(worker_id, epoch, barrier, homes), num_blocks)


def fold_base(base: Base, log: Iterable[bytes]) -> Homes:
    """Returns the blocks of a base and the batches after it."""
    homes = join_parts(map(kv_pb2.KvSnapshot.FromString, base.parts))
    return fold(homes, map(kv_pb2.KvEventBatch.FromString, log))


def restore(parts: Sequence[kv_pb2.KvSnapshot], batches: Sequence[bytes]) -> WorkerBlocks:
    """Returns a worker's blocks from a stored snapshot and batches. Raises InvalidRequest if they do not fit."""
    worker = WorkerBlocks.from_parts(parts)
    for encoded in batches:
        batch = kv_pb2.KvEventBatch.FromString(encoded)
        if not worker.follows(batch):
            raise InvalidRequest(f"a batch is missing after sequence {worker.sequence}")
        worker.apply(batch, encoded)
    return worker


def _growth(encoded: bytes) -> int:
    changes = changes_of(kv_pb2.KvEventBatch.FromString(encoded))
    return sum((1 if is_store else -1) * (len(change.block_hashes) // HASH_BYTES) for is_store, change in changes)
