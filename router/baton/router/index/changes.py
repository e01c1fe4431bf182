"""Block events as packed arrays: fingerprints, columns, and whether each stores or removes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from baton.router.index.holders import DEVICE, HOST, NUM_TIERS, Columns
from baton.router.index.lines import Fingerprints
from baton.rpc.block_hash import HASH_BYTES
from baton.v1 import kv_pb2

_ODD = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)


class Changes:
    """Events of any workers, in order."""

    def __init__(self) -> None:
        self._hashes: list[bytes] = []
        self._columns: list[int] = []
        self._stores: list[bool] = []

    def __len__(self) -> int:
        """Returns the number of events, not blocks."""
        return len(self._hashes)

    def add(self, slot: int, events: Iterable[kv_pb2.KvEvent]) -> None:
        """Adds the events of the worker in `slot`."""
        for event in events:
            stores = event.WhichOneof("event") == "stored"
            change = event.stored if stores else event.removed
            self._hashes.append(change.block_hashes)
            self._columns.append(column_of(slot, change.tier))
            # Blocks that are left in groups after the first alone are of no use.
            self._stores.append(stores and (not event.stored.groups or 0 in event.stored.groups))

    def packed(self) -> tuple[Fingerprints, Columns, NDArray[np.bool_]]:
        """Returns one element for each block of each event."""
        lengths = [len(one) // HASH_BYTES for one in self._hashes]
        fingerprints = fingerprints_of(b"".join(self._hashes))
        return (
            fingerprints,
            np.repeat(np.array(self._columns, np.int64), lengths),
            np.repeat(np.array(self._stores, np.bool_), lengths),
        )


def column_of(slot: int, tier: kv_pb2.KvTier.ValueType) -> int:
    """Returns the column of a worker's blocks in a tier. All tiers but the device count as the host."""
    return slot * NUM_TIERS + (DEVICE if tier == kv_pb2.KV_TIER_DEVICE else HOST)


def fingerprints_of(block_hashes: bytes) -> Fingerprints:
    """Returns the first 64 bits of each hash, mixed; never 0."""
    halves = np.frombuffer(block_hashes, np.uint64, len(block_hashes) // HASH_BYTES * 2)
    # The table takes its segments from the top bits, and its buckets from the lowest: a product serves both.
    spread: Fingerprints = halves[::2] * _ODD
    np.maximum(spread, _ONE, out=spread)
    return spread


def sorted_set(pieces: list[Fingerprints]) -> tuple[Fingerprints, NDArray[np.int64]]:
    """Returns all distinct values in order, and where each was in the concatenated pieces."""
    merged = np.concatenate(pieces)
    order = _order_of(merged)
    merged = merged[order]
    is_first = np.ones(merged.size, np.bool_)
    np.not_equal(merged[1:], merged[:-1], out=is_first[1:])
    return (merged, order) if is_first.all() else (merged[is_first], order[is_first])


def _order_of(values: Fingerprints) -> NDArray[np.int64]:
    """Returns the same as argsort. NumPy sorts 16 bits by counting, several times faster than 64 by comparing."""
    order = np.argsort((values >> np.uint64(32)).astype(np.uint16), kind="stable")
    order = order[np.argsort((values >> np.uint64(48)).astype(np.uint16)[order], kind="stable")]
    tops = values[order] >> np.uint64(32)
    is_tied = np.zeros(values.size, np.bool_)
    is_tied[1:] = tops[1:] == tops[:-1]
    is_tied[:-1] |= is_tied[1:]
    tied = is_tied.nonzero()[0]
    if tied.size:
        some = order[tied]
        order[tied] = some[np.argsort(values[some], kind="stable")]
    return order
