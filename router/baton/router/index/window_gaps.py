"""Blocks that a worker holds without the part of its layers with windows. Knows no worker's name and no liveness.

The index has the blocks that a worker holds in its full KV group. Where windows have groups of their own, their blocks
are evicted on their own; a prefix is usable where the last tokens before its end are there in every group. Workers with
one group send no groups, and have no entries here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.router.index.changes import fingerprints_of
from baton.v1 import kv_pb2


@dataclass(frozen=True, slots=True)
class _Gaps:
    """One worker's blocks, as fingerprints."""

    lost: set[int] = field(default_factory=set)  # on the device without some of the windows
    kept: set[int] = field(default_factory=set)  # whose windows are in host memory


class WindowGaps:
    """The gaps of workers by their slots in the index."""

    def __init__(self) -> None:
        self._gaps: dict[int, _Gaps] = {}

    def add(self, slot: int, events: Iterable[kv_pb2.KvEvent]) -> None:
        """Applies a worker's events, in order."""
        for event in events:
            if event.HasField("stored"):
                self.hold(slot, event.stored)
            elif slot in self._gaps:
                _change(self._gaps[slot], event.removed.tier, event.removed.block_hashes, lost=False, kept=False)

    def hold(self, slot: int, stored: kv_pb2.BlocksStored | kv_pb2.KvSnapshot) -> None:
        """Applies what the worker holds from now on."""
        if not stored.groups and slot not in self._gaps:
            return
        gaps = self._gaps.setdefault(slot, _Gaps())
        kept = not stored.groups or any(stored.groups)
        _change(gaps, stored.tier, stored.block_hashes, lost=bool(stored.groups), kept=kept)

    def drop(self, slot: int) -> None:
        """Drops a worker's entries. Idempotent."""
        self._gaps.pop(slot, None)

    def usable(self, slot: int, block_hashes: bytes, num_blocks: int, block_size: int, window: int) -> int:
        """Returns the blocks of the longest usable prefix, of at most `num_blocks` that the worker holds."""
        gaps = self._gaps.get(slot)
        if gaps is None:
            return num_blocks
        fingerprints = fingerprints_of(block_hashes)
        block = num_blocks
        while block > max(0, num_blocks * block_size - window + 1) // block_size:
            block -= 1
            fingerprint = int(fingerprints[block])
            if fingerprint in gaps.lost and fingerprint not in gaps.kept:
                num_blocks = block
        return num_blocks


def _change(gaps: _Gaps, tier: kv_pb2.KvTier.ValueType, block_hashes: bytes, *, lost: bool, kept: bool) -> None:
    blocks = fingerprints_of(block_hashes).tolist()
    found, there = (gaps.lost, lost) if tier == kv_pb2.KV_TIER_DEVICE else (gaps.kept, kept)
    if there:
        found.update(blocks)
    else:
        found.difference_update(blocks)
