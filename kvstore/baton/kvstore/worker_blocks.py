"""One worker's cached blocks as its events tell them, and how far they were heard. Knows no stream."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from baton.rpc.block_hash import HASH_BYTES
from baton.rpc.errors import InvalidRequest
from baton.v1 import kv_pb2

_HASH = struct.Struct(f"{HASH_BYTES}s")
_BLOCKS_PER_PART = 4096


class WorkerBlocks:
    """The blocks of `worker_id` in `epoch`, up to and including `sequence`."""

    def __init__(self, worker_id: str, epoch: int, sequence: int) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.sequence = sequence
        self._tiers: dict[kv_pb2.KvTier.ValueType, set[bytes]] = {}

    def __len__(self) -> int:
        """Blocks, those of different tiers counted apart."""
        return sum(map(len, list(self._tiers.values())))

    def follows(self, batch: kv_pb2.KvEventBatch) -> bool:
        """Whether the batch is the next one."""
        return batch.epoch == self.epoch and batch.sequence == self.sequence + 1

    def apply(self, batch: kv_pb2.KvEventBatch) -> int:
        """Takes the next batch; returns how many block events it had."""
        assert self.follows(batch)
        num_events = 0
        for event in batch.events:
            kind = event.WhichOneof("event")
            if kind == "stored":
                hashes = split_hashes(event.stored.block_hashes)
                self._tier(event.stored.tier).update(hashes)
            else:
                hashes = split_hashes(event.removed.block_hashes)
                self._tier(event.removed.tier).difference_update(hashes)
            num_events += len(hashes)
        self.sequence = batch.sequence
        return num_events

    def add(self, part: kv_pb2.KvSnapshot) -> None:
        """Takes one part of a snapshot."""
        self._tier(part.tier).update(split_hashes(part.block_hashes))

    def blocks(self, tier: kv_pb2.KvTier.ValueType) -> frozenset[bytes]:
        """What one tier holds."""
        return frozenset(self._tiers.get(tier, ()))

    def snapshot(self) -> Iterator[kv_pb2.KvSnapshot]:
        """Everything as of now in parts: what changes while they are read is not in them."""
        packed = [(tier, b"".join(blocks)) for tier, blocks in self._tiers.items() if blocks]
        return _parts(self.worker_id, self.epoch, self.sequence, packed or [(kv_pb2.KV_TIER_DEVICE, b"")])

    def _tier(self, tier: kv_pb2.KvTier.ValueType) -> set[bytes]:
        blocks = self._tiers.get(tier)
        if blocks is None:
            if tier == kv_pb2.KV_TIER_UNSPECIFIED:
                raise InvalidRequest(f"tier of worker {self.worker_id!r} is unset; say which", field="tier")
            blocks = self._tiers[tier] = set()
        return blocks


def split_hashes(packed: bytes) -> list[bytes]:
    """The block hashes of a packed field."""
    if len(packed) % HASH_BYTES:
        raise InvalidRequest(f"block_hashes has {len(packed)} bytes; it must be {HASH_BYTES} a block")
    return [block for (block,) in _HASH.iter_unpack(packed)]


def _parts(
    worker_id: str, epoch: int, barrier: int, tiers: list[tuple[kv_pb2.KvTier.ValueType, bytes]]
) -> Iterator[kv_pb2.KvSnapshot]:
    stride = _BLOCKS_PER_PART * HASH_BYTES
    for index, (tier, hashes) in enumerate(tiers):
        for start in range(0, max(1, len(hashes)), stride):
            yield kv_pb2.KvSnapshot(
                worker_id=worker_id,
                epoch=epoch,
                barrier=barrier,
                block_hashes=hashes[start : start + stride],
                tier=tier,
                first=index == 0 and start == 0,
                last=index == len(tiers) - 1 and start + stride >= len(hashes),
            )
