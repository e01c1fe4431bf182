"""Block hashes by tier as packed bytes, and events folded into them. Knows no stream; numpy does the work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.rpc.block_hash import HASH_BYTES
from baton.rpc.errors import InvalidRequest
from baton.v1 import kv_pb2

Tier: TypeAlias = kv_pb2.KvTier.ValueType
Tiers: TypeAlias = Mapping[Tier, bytes]  # 16 bytes a block

_BLOCKS_PER_PART = 8192  # 128 KiB: a reader takes it in milliseconds


def encode_parts(worker_id: str, epoch: int, barrier: int, tiers: Tiers) -> tuple[bytes, ...]:
    """A snapshot as encoded KvSnapshots. There is always one, an empty one if need be."""
    filled = [(tier, hashes) for tier, hashes in tiers.items() if hashes] or [(kv_pb2.KV_TIER_DEVICE, b"")]
    stride = _BLOCKS_PER_PART * HASH_BYTES
    pieces = [
        (tier, hashes[start : start + stride])
        for tier, hashes in filled
        for start in range(0, max(1, len(hashes)), stride)
    ]
    return tuple(
        kv_pb2.KvSnapshot(
            worker_id=worker_id,
            epoch=epoch,
            barrier=barrier,
            block_hashes=hashes,
            tier=tier,
            first=place == 0,
            last=place == len(pieces) - 1,
        ).SerializeToString()
        for place, (tier, hashes) in enumerate(pieces)
    )


def join_parts(parts: Iterable[kv_pb2.KvSnapshot]) -> Tiers:
    """What a snapshot's parts hold together. InvalidRequest: malformed."""
    pieces: dict[Tier, list[bytes]] = {}
    for part in parts:
        check_change(part)
        if part.block_hashes:
            pieces.setdefault(part.tier, []).append(part.block_hashes)
    return {tier: b"".join(hashes) for tier, hashes in pieces.items()}


def check_change(change: kv_pb2.BlocksStored | kv_pb2.BlocksRemoved | kv_pb2.KvSnapshot) -> int:
    """How many blocks it names. InvalidRequest: malformed."""
    if change.tier == kv_pb2.KV_TIER_UNSPECIFIED:
        raise InvalidRequest("tier is unset; say which", field="tier")
    num_blocks, rest = divmod(len(change.block_hashes), HASH_BYTES)
    if rest:
        raise InvalidRequest(f"block_hashes has {len(change.block_hashes)} bytes; it must be {HASH_BYTES} a block")
    return num_blocks


def changes_of(batch: kv_pb2.KvEventBatch) -> Iterator[tuple[bool, kv_pb2.BlocksStored | kv_pb2.BlocksRemoved]]:
    """A batch's changes in order; True with those that store."""
    for event in batch.events:
        if event.HasField("stored"):
            yield True, event.stored
        elif event.HasField("removed"):
            yield False, event.removed


def fold(tiers: Tiers, batches: Iterable[kv_pb2.KvEventBatch]) -> Tiers:
    """The blocks after the batches: of each block the last event counts."""
    hashes: dict[Tier, list[bytes]] = {tier: [packed] for tier, packed in tiers.items()}
    stores: dict[Tier, list[bool]] = {tier: [True] for tier in tiers}
    for batch in batches:
        for is_store, change in changes_of(batch):
            hashes.setdefault(change.tier, []).append(change.block_hashes)
            stores.setdefault(change.tier, []).append(is_store)
    return {tier: _fold_tier(pieces, stores[tier]) for tier, pieces in hashes.items()}


def _fold_tier(pieces: list[bytes], stores: list[bool]) -> bytes:
    halves = np.frombuffer(b"".join(pieces), np.uint64).reshape(-1, 2)
    lengths = [len(piece) // HASH_BYTES for piece in pieces]
    is_store = np.repeat(np.array(stores, np.bool_), lengths)
    last = _last_of_each(halves)
    kept = last[is_store[last]]
    kept.sort()
    return halves[kept].tobytes()


def _last_of_each(halves: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The place of each distinct row's last occurrence, in any order."""
    order = np.argsort(halves[:, 0], kind="stable")
    rows = halves[order]
    same_half = rows[1:, 0] == rows[:-1, 0]
    if (rows[1:, 1] != rows[:-1, 1])[same_half].any():
        # Different blocks with the same first half: only a sort by both keeps equal ones together.
        order = np.lexsort((halves[:, 1], halves[:, 0]))
        rows = halves[order]
    is_last = np.ones(len(rows), np.bool_)
    is_last[:-1] = (rows[1:] != rows[:-1]).any(axis=1)
    return order[is_last]
