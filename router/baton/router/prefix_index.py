"""Which worker holds which block, in packed arrays. Knows no stream and no liveness.

A worker has a slot, one bit in each tier. Dropping a worker makes its slot dead at once; the bits are cleared
afterwards in small pieces (`clean`), and only then is the slot given away again. Blocks are known by 64 bits of their
128: two of 10 million blocks are taken for one with a probability of 3 in a million, and the worker's own lookup
would find that out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.router.index_changes import Changes, column_of, fingerprints_of, sorted_set
from baton.router.index_holders import DEVICE, HOST, NUM_TIERS, Columns, Holders
from baton.router.index_lines import Fingerprints, LineNumbers
from baton.router.index_masks import ends_of, sum_rows
from baton.router.index_table import BlockTable, add_at, rank_in_runs
from baton.v1 import kv_pb2

_ABSORBED_BLOCKS = 8192


class HeldPrefix(NamedTuple):
    """How much of a prompt's beginning one worker holds, without a gap: `device + host` blocks."""

    device: int  # blocks of it that are on the device
    host: int  # blocks of it that are in host memory only


@dataclass(slots=True)
class _Holding:
    """One worker's entries."""

    slot: int
    epoch: int
    sequence: int


@dataclass(slots=True)
class _Arrival:
    """A snapshot that does not count yet."""

    holding: _Holding
    pieces: dict[int, list[Fingerprints]]  # by column
    sorted: list[_Column]  # what is left to be stored, once all is there


@dataclass(slots=True)
class _Column:
    """What is left of a snapshot's blocks in one tier, sorted."""

    number: int
    fingerprints: Fingerprints
    order: NDArray[np.int64]  # of their arrival
    lines: LineNumbers  # one for each block, by arrival
    is_spare: NDArray[np.bool_]  # of those lines


class PrefixIndex:
    """All workers' blocks, for lookups of whole prompts."""

    def __init__(self) -> None:
        self._table = BlockTable()
        self._holders = Holders()
        self._counts = np.zeros(64 * NUM_TIERS, np.int64)  # entries of each column
        self._holdings: dict[str, _Holding] = {}
        self._arriving: dict[str, _Arrival] = {}  # snapshots whose end is still to come
        self._absorbing: dict[str, _Arrival] = {}  # whole ones that are still to be stored
        self._silent: set[str] = set()  # workers whose entries are kept, and do not count
        self._dying: list[int] = []  # slots
        self._sweep = _Sweep([], 0)
        self._names: list[str] = []  # worker of each slot; empty: nobody's
        self._free_slots: list[int] = []
        self._live: int | None = None  # of the slots that count; None: to be made anew
        self._uses_host = False  # ever

    def __len__(self) -> int:
        """Distinct blocks, those of dead slots included until cleaned."""
        return len(self._table)

    @property
    def num_bytes(self) -> int:
        """Memory that blocks take."""
        return self._table.num_bytes + self._holders.num_bytes

    @property
    def num_dying_blocks(self) -> int:
        """Entries of dropped workers that are still to be cleaned."""
        return sum(map(self._num_entries, (*self._dying, *self._sweep.slots)))

    @property
    def worker_ids(self) -> Sequence[str]:
        """Workers that have entries."""
        return tuple(self._holdings)

    def num_blocks(self, worker_id: str) -> int:
        """Entries of one worker that count, its tiers counted apart."""
        holding = self._holdings.get(worker_id)
        return self._num_entries(holding.slot) if holding is not None and worker_id not in self._silent else 0

    def epoch(self, worker_id: str) -> int | None:
        """Of a worker's entries. None: it has none."""
        holding = self._holdings.get(worker_id)
        return holding.epoch if holding is not None else None

    def position(self, worker_id: str) -> tuple[int, int] | None:
        """Epoch and sequence up to which a worker was heard. None: it has no entries."""
        holding = self._holdings.get(worker_id)
        return (holding.epoch, holding.sequence) if holding is not None else None

    def lookup(self, block_hashes: bytes) -> dict[str, int]:
        """How many of the first blocks each worker holds without a gap, in any tier; without those that hold none."""
        _, held = self._prefixes(block_hashes)
        names = self._names
        return {names[slot]: depth for slot, depth in ends_of(held, self._live_bits())} if held.size else {}

    def find(self, block_hashes: bytes) -> dict[str, HeldPrefix]:
        """As `lookup`, by tier. A block in both tiers counts as on the device."""
        on_device, held = self._prefixes(block_hashes)
        if not held.size:
            return {}
        names, ends = self._names, ends_of(held, self._live_bits())
        if not self._uses_host:
            return {names[slot]: HeldPrefix(depth, 0) for slot, depth in ends}
        counts = sum_rows(on_device & held).tolist()
        return {names[slot]: HeldPrefix(counts[slot], depth - counts[slot]) for slot, depth in ends}

    def apply(self, batch: kv_pb2.KvEventBatch) -> bool:
        """Takes a worker's next batch. False: it is not the next one, and the worker's entries are dropped."""
        return not self.apply_all((batch,))

    def apply_all(self, batches: Iterable[kv_pb2.KvEventBatch]) -> dict[str, int]:
        """Takes batches in order, at the cost of one; returns the workers that were out of step and are dropped, and
        how many entries they had.

        A batch that was taken before is ignored.
        """
        self._absorb_all()
        changes = Changes()
        dropped: dict[str, int] = {}
        for batch in batches:
            holding = self._holdings.get(batch.worker_id)
            if holding is not None and holding.epoch == batch.epoch and batch.sequence <= holding.sequence:
                continue
            if holding is None or (holding.epoch, holding.sequence + 1) != (batch.epoch, batch.sequence):
                # What was taken must be counted, or the worker's slot would seem empty.
                self._change(*changes.packed())
                changes = Changes()
                dropped[batch.worker_id] = dropped.get(batch.worker_id, 0) + self.drop(batch.worker_id)
                continue
            changes.add(holding.slot, batch.events)
            holding.sequence = batch.sequence
        self._change(*changes.packed())
        return dropped

    def receive(self, part: kv_pb2.KvSnapshot) -> bool:
        """Takes a part of a worker's snapshot; the last one makes it count. False: the part does not belong here."""
        belongs = self.collect(part)
        self._absorb_all()
        return belongs

    def collect(self, part: kv_pb2.KvSnapshot) -> bool:
        """As `receive`, but what came with the last part counts only after `absorb` has returned False."""
        if part.first:
            self._begin(part)
        arrival = self._arriving.get(part.worker_id)
        if arrival is None or (arrival.holding.epoch, arrival.holding.sequence) != (part.epoch, part.barrier):
            self.drop(part.worker_id)
            return False
        column = column_of(arrival.holding.slot, part.tier)
        arrival.pieces.setdefault(column, []).append(fingerprints_of(part.block_hashes))
        if part.last:
            self._absorbing[part.worker_id] = self._arriving.pop(part.worker_id)
            # In order, so that neighbours in time are neighbours in the table.
            arrival.sorted = [self._column(column, pieces) for column, pieces in arrival.pieces.items()]
            arrival.pieces.clear()
        return True

    def absorb(self, max_blocks: int) -> bool:
        """Stores so many blocks of whole snapshots. False: nothing is left to store."""
        if not self._absorbing:
            return False
        worker_id, arrival = next(iter(self._absorbing.items()))
        if arrival.sorted:
            column = arrival.sorted[-1]
            self._store(column, max_blocks)
            if not column.fingerprints.size:
                arrival.sorted.pop()
                self._table.lines.give(column.lines[column.is_spare])
        if not arrival.sorted:
            del self._absorbing[worker_id]
            self._retire(self._holdings.pop(worker_id, None))
            self._holdings[worker_id] = arrival.holding
            self._live = None
        return bool(self._absorbing)

    def silence(self, worker_id: str) -> None:
        """The worker's entries, those that come included, are kept and do not count until `hear`."""
        if worker_id not in self._silent:
            self._silent.add(worker_id)
            self._live = None

    def hear(self, worker_id: str) -> None:
        """Ends `silence`."""
        if worker_id in self._silent:
            self._silent.remove(worker_id)
            self._live = None

    def is_silent(self, worker_id: str) -> bool:
        """Whether the worker's entries do not count now."""
        return worker_id in self._silent

    def drop(self, worker_id: str) -> int:
        """A worker's entries count no more, from now on; returns how many they were."""
        holding = self._holdings.pop(worker_id, None)
        self._retire(holding)
        self._end_arrivals(worker_id)
        return self._num_entries(holding.slot) if holding is not None else 0

    def clean(self, max_lines: int) -> bool:
        """Clears bits of dropped workers in so many lines of the table. False: nothing is left to clean."""
        sweep = self._sweep
        if not sweep.slots:
            sweep = self._sweep = _Sweep(self._dying, 0)
            self._dying = []
        if sweep.slots:
            end = min(sweep.at + max_lines, self._table.lines.end)
            self._strip(sweep, end)
            sweep.at = end
            is_clean = not any(map(self._num_entries, sweep.slots))
            if is_clean or end == self._table.lines.end:
                assert is_clean, "a swept slot still has entries"
                self._free_slots += sweep.slots
                self._sweep = _Sweep([], 0)
        return bool(self._sweep.slots or self._dying)

    def _num_entries(self, slot: int) -> int:
        return int(self._counts[slot * NUM_TIERS : (slot + 1) * NUM_TIERS].sum())

    def _prefixes(self, block_hashes: bytes) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """The slots that have each of the first blocks on the device, and those that hold it and all before in any
        tier. [n, words]"""
        codes = self._table.find_prefix(fingerprints_of(block_hashes))
        on_device = self._holders.words_of(codes, DEVICE)
        anywhere = on_device | self._holders.words_of(codes, HOST) if self._uses_host else on_device
        if not codes.size:
            return on_device, anywhere
        if anywhere.shape[1] == 1:  # numpy is several times quicker on one dimension
            return on_device, np.bitwise_and.accumulate(anywhere.ravel()).reshape(-1, 1)
        return on_device, np.bitwise_and.accumulate(anywhere, axis=0)

    def _live_bits(self) -> int:
        """A bit for each slot that counts."""
        if self._live is None:
            counting = [one.slot for name, one in self._holdings.items() if name not in self._silent]
            self._live = sum(1 << slot for slot in counting)
        return self._live

    def _absorb_all(self) -> None:
        while self.absorb(_ABSORBED_BLOCKS):
            pass

    def _end_arrivals(self, worker_id: str) -> None:
        for arrivals in (self._arriving, self._absorbing):
            arrival = arrivals.pop(worker_id, None)
            if arrival is not None:
                for column in arrival.sorted:
                    self._table.lines.give(column.lines[column.is_spare])
                self._retire(arrival.holding)

    def _change(self, fingerprints: Fingerprints, columns: Columns, stores: NDArray[np.bool_]) -> None:
        """Applies changes in order: the n-th change of each block in the n-th round."""
        if not fingerprints.size:
            return
        self._note_host(columns)
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

    def _change_distinct(
        self, fingerprints: Fingerprints, columns: Columns, stores: NDArray[np.bool_], order: NDArray[np.int64]
    ) -> None:
        """Changes of different blocks, sorted; `order`: how they came."""
        table = self._table
        places = table.find(fingerprints)
        new = ((places < 0) & stores).nonzero()[0]
        if new.size:
            added = np.empty(new.size, np.int64)
            added[np.argsort(order[new])] = table.lines.take(new.size)
            if table.insert(fingerprints[new], added):
                places = table.find(fingerprints)
            table.lines.codes[added] = columns[new] + 1
            add_at(self._counts, columns[new], 1)
        known = places >= 0
        if new.size:
            known[new] = False
        stored = (known & stores).nonzero()[0]
        if stored.size:
            lines, shared = table.lines_at(places[stored]), columns[stored]
            table.lines.codes[lines], lacked = self._holders.add(table.lines.codes[lines], shared)
            add_at(self._counts, shared[lacked], 1)
        removed = (known & ~stores).nonzero()[0]
        if removed.size:
            at, taken = places[removed], columns[removed]
            lines = table.lines_at(at)
            codes, had = self._holders.discard(table.lines.codes[lines], taken)
            table.lines.codes[lines] = codes
            gone = codes == 0
            table.remove(at[gone], lines[gone])
            add_at(self._counts, taken[had], -1)

    def _column(self, number: int, pieces: list[Fingerprints]) -> _Column:
        fingerprints, order = sorted_set(pieces)
        count = sum(piece.size for piece in pieces)
        return _Column(number, fingerprints, order, self._table.lines.take(count), np.ones(count, np.bool_))

    def _store(self, column: _Column, max_blocks: int) -> None:
        """Stores some blocks of a snapshot."""
        table = self._table
        fingerprints, order = column.fingerprints[:max_blocks], column.order[:max_blocks]
        column.fingerprints, column.order = column.fingerprints[max_blocks:], column.order[max_blocks:]
        self._note_host(np.array([column.number]))
        places = table.find(fingerprints)
        known, new = (places >= 0).nonzero()[0], (places < 0).nonzero()[0]
        if known.size:
            # In order: what the prompts' next blocks are shared by is then side by side too.
            lines = np.sort(table.lines_at(places[known]))
            columns = np.full(known.size, column.number, np.int64)
            table.lines.codes[lines], lacked = self._holders.add(table.lines.codes[lines], columns)
            self._counts[column.number] += np.count_nonzero(lacked)
        if new.size:
            lines = column.lines[order[new]]
            column.is_spare[order[new]] = False
            table.insert(fingerprints[new], lines)
            table.lines.codes[lines] = column.number + 1
            self._counts[column.number] += new.size

    def _note_host(self, columns: Columns) -> None:
        self._uses_host = self._uses_host or bool((columns % NUM_TIERS == HOST).any())

    def _strip(self, sweep: _Sweep, end: int) -> None:
        """Clears the swept slots' bits in the lines up to `end`."""
        table = self._table
        lines = sweep.at + table.lines.codes[sweep.at : end].nonzero()[0]
        mask = self._holders.mask_of(sweep.slots)
        found = self._holders.masks(table.lines.codes[lines]) & mask
        hit = np.flatnonzero(found.any(axis=(1, 2)))
        if not hit.size:
            return
        lines, found = lines[hit], found[hit]
        for slot in sweep.slots:
            bit = np.uint64(1 << (slot % 64))
            lost = np.count_nonzero(found[:, :, slot // 64] & bit, axis=0)
            self._counts[slot * NUM_TIERS : (slot + 1) * NUM_TIERS] -= lost
        codes = self._holders.strip(table.lines.codes[lines], mask)
        table.lines.codes[lines] = codes
        gone = lines[codes == 0]
        table.remove(table.find(table.lines.fingerprints[gone]), gone)

    def _begin(self, part: kv_pb2.KvSnapshot) -> None:
        known = self._holdings.get(part.worker_id)
        if known is not None and known.epoch != part.epoch:
            self._retire(self._holdings.pop(part.worker_id))
        self._end_arrivals(part.worker_id)
        slot = self._take_slot(part.worker_id)
        self._arriving[part.worker_id] = _Arrival(_Holding(slot, part.epoch, part.barrier), {}, [])

    def _take_slot(self, worker_id: str) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
            self._names[slot] = worker_id
            return slot
        slot = self._holders.add_slot()
        self._live = None
        self._names.append(worker_id)
        if (slot + 1) * NUM_TIERS > self._counts.size:
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        return slot

    def _retire(self, holding: _Holding | None) -> None:
        if holding is None:
            return
        self._live = None
        self._names[holding.slot] = ""
        if self._num_entries(holding.slot):
            self._dying.append(holding.slot)
        else:
            self._free_slots.append(holding.slot)


@dataclass(slots=True)
class _Sweep:
    """One pass over the table on behalf of these slots."""

    slots: list[int]
    at: int
