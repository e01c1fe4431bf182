"""Block hashes by home as packed bytes, and events applied to them in bulk with NumPy. Knows no stream.

A home is a tier and the groups of the worker's cache that hold the block there. An event names all groups that hold a
block from then on, so the last event of each block in a tier decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.rpc.block_hash import HASH_BYTES
from baton.rpc.errors import InvalidRequest
from baton.v1 import kv_pb2

Tier: TypeAlias = kv_pb2.KvTier.ValueType


class Home(NamedTuple):
    """The place of blocks: a tier and groups of the worker's cache."""

    tier: Tier
    groups: tuple[int, ...] = ()  # the groups that hold them; empty: all


Homes: TypeAlias = Mapping[Home, bytes]  # 16 bytes a block

_BLOCKS_PER_PART = 8192  # 128 KiB: a reader applies it in milliseconds


def encode_parts(worker_id: str, epoch: int, barrier: int, homes: Homes) -> tuple[bytes, ...]:
    """Encodes a snapshot as KvSnapshots, at least one."""
    filled = [(home, hashes) for home, hashes in homes.items() if hashes] or [(Home(kv_pb2.KV_TIER_DEVICE), b"")]
    stride = _BLOCKS_PER_PART * HASH_BYTES
    pieces = [
        (home, hashes[start : start + stride])
        for home, hashes in filled
        for start in range(0, max(1, len(hashes)), stride)
    ]
    return tuple(
        kv_pb2.KvSnapshot(
            worker_id=worker_id,
            epoch=epoch,
            barrier=barrier,
            block_hashes=hashes,
            tier=home.tier,
            first=place == 0,
            last=place == len(pieces) - 1,
            groups=home.groups,
        ).SerializeToString()
        for place, (home, hashes) in enumerate(pieces)
    )


def join_parts(parts: Iterable[kv_pb2.KvSnapshot]) -> Homes:
    """Joins the parts of a snapshot. Raises InvalidRequest for a malformed part."""
    pieces: dict[Home, list[bytes]] = {}
    for part in parts:
        check_change(part)
        if part.block_hashes:
            pieces.setdefault(Home(part.tier, tuple(part.groups)), []).append(part.block_hashes)
    return {home: b"".join(hashes) for home, hashes in pieces.items()}


def check_change(change: kv_pb2.BlocksStored | kv_pb2.BlocksRemoved | kv_pb2.KvSnapshot) -> int:
    """Returns the number of blocks that a change names. Raises InvalidRequest if it is malformed."""
    if change.tier == kv_pb2.KV_TIER_UNSPECIFIED:
        raise InvalidRequest("tier is unset; it must be set", field="tier")
    num_blocks, rest = divmod(len(change.block_hashes), HASH_BYTES)
    if rest:
        raise InvalidRequest(f"block_hashes has {len(change.block_hashes)} bytes; it must be {HASH_BYTES} a block")
    return num_blocks


def changes_of(batch: kv_pb2.KvEventBatch) -> Iterator[tuple[bool, kv_pb2.BlocksStored | kv_pb2.BlocksRemoved]]:
    """Yields a batch's changes in order, each with whether it stores blocks."""
    for event in batch.events:
        if event.HasField("stored"):
            yield True, event.stored
        elif event.HasField("removed"):
            yield False, event.removed


def fold(homes: Homes, batches: Iterable[kv_pb2.KvEventBatch]) -> Homes:
    """Returns the blocks after the batches. The last event of each block in a tier decides."""
    changes: dict[Tier, list[tuple[Home | None, bytes]]] = {}  # the blocks' new home; None: removed
    for home, packed in homes.items():
        changes.setdefault(home.tier, []).append((home, packed))
    for batch in batches:
        for is_store, change in changes_of(batch):
            groups = tuple(change.groups) if isinstance(change, kv_pb2.BlocksStored) else ()
            now = Home(change.tier, groups) if is_store else None
            changes.setdefault(change.tier, []).append((now, change.block_hashes))
    folded: dict[Home, bytes] = {}
    for of_tier in changes.values():
        folded.update(_fold_tier(of_tier))
    return folded


def _fold_tier(changes: Sequence[tuple[Home | None, bytes]]) -> Homes:
    known = list(dict.fromkeys(home for home, _ in changes if home is not None))
    numbers = {None: -1} | {home: number for number, home in enumerate(known)}
    halves = np.frombuffer(b"".join(packed for _, packed in changes), np.uint64).reshape(-1, 2)
    lengths = [len(packed) // HASH_BYTES for _, packed in changes]
    home_of = np.repeat(np.array([numbers[home] for home, _ in changes], np.int64), lengths)
    last = _last_of_each(halves)
    last.sort()
    return {home: halves[last[home_of[last] == number]].tobytes() for number, home in enumerate(known)}


def _last_of_each(halves: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns the index of each distinct row's last occurrence, in any order."""
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
