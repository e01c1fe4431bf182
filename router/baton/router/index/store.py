"""Blocks and their holders in packed arrays: a table of lines, holders by code, and the number of entries per column.

Knows no worker's name, no epoch and no liveness.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.router.index.changes import sorted_set
from baton.router.index.holders import DEVICE, HOST, NUM_TIERS, Columns, Holders
from baton.router.index.lines import Fingerprints, LineNumbers
from baton.router.index.table import BlockTable, add_at, rank_in_runs

_FEW_CHANGES = 16


@dataclass(slots=True)
class Column:
    """The unstored blocks of a snapshot in one tier, sorted."""

    number: int
    fingerprints: Fingerprints
    order: NDArray[np.int64]  # of their arrival
    lines: LineNumbers  # one for each block, by arrival
    is_spare: NDArray[np.bool_]  # of those lines


class BlockStore:
    """Entries of slots. The caller assigns slots to workers, and selects the slots of a lookup."""

    def __init__(self) -> None:
        self._table = BlockTable()
        self._holders = Holders()
        self._counts = np.zeros(64 * NUM_TIERS, np.int64)  # entries of each column
        self.uses_host = False  # ever

    def __len__(self) -> int:
        return len(self._table)

    @property
    def num_bytes(self) -> int:
        """Memory of the blocks."""
        return self._table.num_bytes + self._holders.num_bytes

    @property
    def num_lines(self) -> int:
        """Number of lines to sweep: all entries are in these."""
        return self._table.lines.end

    def num_entries(self, slot: int) -> int:
        """Returns the number of a slot's entries over all tiers."""
        return int(self._counts[slot * NUM_TIERS : (slot + 1) * NUM_TIERS].sum())

    def add_slot(self) -> int:
        """Returns a new slot. Raises NoCapacity if there are too many."""
        slot = self._holders.add_slot()
        if (slot + 1) * NUM_TIERS > self._counts.size:
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        return slot

    def prefixes(self, fingerprints: Fingerprints) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Returns the slots that hold each of the first blocks on the device, and in any tier without a gap."""
        codes = self._table.find_prefix(fingerprints)
        on_device = self._holders.words_of(codes, DEVICE)
        anywhere = on_device | self._holders.words_of(codes, HOST) if self.uses_host else on_device
        if not codes.size:
            return on_device, anywhere
        if anywhere.shape[1] == 1:  # numpy is several times quicker on one dimension
            return on_device, np.bitwise_and.accumulate(anywhere.ravel()).reshape(-1, 1)
        return on_device, np.bitwise_and.accumulate(anywhere, axis=0)

    def change(self, fingerprints: Fingerprints, columns: Columns, stores: NDArray[np.bool_]) -> None:
        """Applies changes in order: the n-th change of each block in the n-th round."""
        if not fingerprints.size:
            return
        self._note_host(columns)
        if fingerprints.size <= _FEW_CHANGES and self._change_few(fingerprints, columns, stores):
            return
        order = np.argsort(fingerprints, kind="stable")
        fingerprints, columns, stores = fingerprints[order], columns[order], stores[order]
        ranks = rank_in_runs(fingerprints)
        num_rounds = int(ranks.max()) + 1 if ranks.size else 0
        if num_rounds <= 1:
            self._change_distinct(fingerprints, columns, stores, order)
            return
        for number in range(num_rounds):
            chosen = ranks == number
            self._change_distinct(fingerprints[chosen], columns[chosen], stores[chosen], order[chosen])

    def _change_few(self, fingerprints: Fingerprints, columns: Columns, stores: NDArray[np.bool_]) -> bool:
        """Adds new blocks one by one, which is faster than by arrays for few.

        Returns False, with no change, if some are known or there is no capacity.
        """
        blocks = fingerprints.tolist()
        if len(set(blocks)) < len(blocks) or not stores.all():
            return False
        slots = self._table.free_slots(blocks)
        if slots is None:
            return False
        lines = self._table.lines
        added = lines.take(len(blocks))
        self._table.put(slots, fingerprints, added)
        lines.codes[added] = columns + 1
        for column in columns.tolist():
            self._counts[column] += 1
        return True

    def _change_distinct(
        self, fingerprints: Fingerprints, columns: Columns, stores: NDArray[np.bool_], order: NDArray[np.int64]
    ) -> None:
        """Applies changes of different blocks, sorted. `order` is their order of arrival."""
        table = self._table
        slots = table.find(fingerprints)
        new = ((slots < 0) & stores).nonzero()[0]
        if new.size:
            added = np.empty(new.size, np.int64)
            added[np.argsort(order[new])] = table.lines.take(new.size)
            if table.insert(fingerprints[new], added):
                slots = table.find(fingerprints)
            table.lines.codes[added] = columns[new] + 1
            add_at(self._counts, columns[new], 1)
        known = slots >= 0
        if new.size:
            known[new] = False
        stored = (known & stores).nonzero()[0]
        if stored.size:
            lines, shared = table.lines_at(slots[stored]), columns[stored]
            table.lines.codes[lines], lacked = self._holders.add(table.lines.codes[lines], shared)
            add_at(self._counts, shared[lacked], 1)
        removed = (known & ~stores).nonzero()[0]
        if removed.size:
            at, taken = slots[removed], columns[removed]
            lines = table.lines_at(at)
            codes, had = self._holders.discard(table.lines.codes[lines], taken)
            table.lines.codes[lines] = codes
            gone = codes == 0
            table.remove(at[gone], lines[gone])
            add_at(self._counts, taken[had], -1)

    def column(self, number: int, pieces: list[Fingerprints]) -> Column:
        """Prepares to store a snapshot's blocks in one column, and allocates their lines."""
        fingerprints, order = sorted_set(pieces)
        count = sum(piece.size for piece in pieces)
        return Column(number, fingerprints, order, self._table.lines.take(count), np.ones(count, np.bool_))

    def give_up(self, column: Column) -> None:
        """Stops storing a snapshot and frees its unused lines."""
        self._table.lines.give(column.lines[column.is_spare])

    def store(self, column: Column, max_blocks: int) -> None:
        """Stores some blocks of a snapshot."""
        table = self._table
        fingerprints, order = column.fingerprints[:max_blocks], column.order[:max_blocks]
        column.fingerprints, column.order = column.fingerprints[max_blocks:], column.order[max_blocks:]
        self._note_host(np.array([column.number]))
        slots = table.find(fingerprints)
        known, new = (slots >= 0).nonzero()[0], (slots < 0).nonzero()[0]
        if known.size:
            # In order: what the prompts' next blocks are shared by is then side by side too.
            lines = np.sort(table.lines_at(slots[known]))
            columns = np.full(known.size, column.number, np.int64)
            table.lines.codes[lines], lacked = self._holders.add(table.lines.codes[lines], columns)
            self._counts[column.number] += np.count_nonzero(lacked)
        if new.size:
            lines = column.lines[order[new]]
            column.is_spare[order[new]] = False
            table.insert(fingerprints[new], lines)
            table.lines.codes[lines] = column.number + 1
            self._counts[column.number] += new.size

    def strip(self, slots: list[int], begin: int, end: int) -> None:
        """Clears the slots' bits in the lines from `begin` to `end`."""
        table = self._table
        lines = begin + table.lines.codes[begin:end].nonzero()[0]
        mask = self._holders.mask_of(slots)
        found = self._holders.masks(table.lines.codes[lines]) & mask
        hit = np.flatnonzero(found.any(axis=(1, 2)))
        if not hit.size:
            return
        lines, found = lines[hit], found[hit]
        for slot in slots:
            bit = np.uint64(1 << (slot % 64))
            lost = np.count_nonzero(found[:, :, slot // 64] & bit, axis=0)
            self._counts[slot * NUM_TIERS : (slot + 1) * NUM_TIERS] -= lost
        codes = self._holders.strip(table.lines.codes[lines], mask)
        table.lines.codes[lines] = codes
        gone = lines[codes == 0]
        table.remove(table.find(table.lines.fingerprints[gone]), gone)

    def _note_host(self, columns: Columns) -> None:
        if not self.uses_host:
            self.uses_host = bool((columns % NUM_TIERS == HOST).any())
