"""The index of which worker holds which block, in packed arrays. Knows no stream.

A worker has a slot, one bit in each tier. Dropping a worker marks its slot dead at once. The bits are cleared
afterwards in small pieces (`clean`), and only then is the slot used again. Blocks are identified by 64 bits of their
128: among 10 million blocks, two collide with a probability of 3 in a million, which the worker's own lookup would
correct.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.router.index.changes import Changes, column_of, fingerprints_of
from baton.router.index.lines import Fingerprints
from baton.router.index.masks import ends_of, sum_rows
from baton.router.index.store import BlockStore, Column
from baton.router.index.window_gaps import WindowGaps
from baton.v1 import kv_pb2

_ABSORBED_BLOCKS = 8192


class HeldPrefix(NamedTuple):
    """The length of the prompt's prefix that one worker holds without a gap: `device + host` blocks."""

    device: int  # blocks of it that are on the device
    host: int  # blocks of it that are in host memory only


@dataclass(slots=True)
class _Holding:
    """The entries of one worker."""

    slot: int
    epoch: int
    sequence: int


@dataclass(slots=True)
class _Arrival:
    """A snapshot that does not count yet."""

    holding: _Holding
    pieces: dict[int, list[Fingerprints]]  # by column
    sorted: list[Column]  # blocks still to be stored, once the snapshot is complete


class PrefixIndex:
    """All workers' blocks, for lookups of whole prompts."""

    def __init__(self) -> None:
        self._store = BlockStore()
        self._gaps = WindowGaps()
        self._holdings: dict[str, _Holding] = {}
        self._arriving: dict[str, _Arrival] = {}  # snapshots whose end is still to come
        self._absorbing: dict[str, _Arrival] = {}  # whole ones that are still to be stored
        self._silent: set[str] = set()  # workers whose entries are kept, and do not count
        self._dying: list[int] = []  # slots
        self._sweep = _Sweep([], 0)
        self._names: list[str] = []  # worker of each slot; empty: free
        self._free_slots: list[int] = []
        self._live: int | None = None  # bits of the slots that count; None: to be recomputed

    def __len__(self) -> int:
        """Returns the number of distinct blocks, including those of dead slots until they are cleaned."""
        return len(self._store)

    @property
    def num_bytes(self) -> int:
        """Memory of the blocks."""
        return self._store.num_bytes

    @property
    def num_dying_blocks(self) -> int:
        """Number of dropped workers' entries that are still to be cleaned."""
        return sum(map(self._store.num_entries, (*self._dying, *self._sweep.slots)))

    @property
    def worker_ids(self) -> Sequence[str]:
        """Number of workers with entries."""
        return tuple(self._holdings)

    def num_blocks(self, worker_id: str) -> int:
        """Returns the number of one worker's entries that count, over all tiers."""
        holding = self._holdings.get(worker_id)
        return self._store.num_entries(holding.slot) if holding is not None and worker_id not in self._silent else 0

    def epoch(self, worker_id: str) -> int | None:
        """Returns the epoch of a worker's entries, or None if it has none."""
        holding = self._holdings.get(worker_id)
        return holding.epoch if holding is not None else None

    def position(self, worker_id: str) -> tuple[int, int] | None:
        """Returns the epoch and sequence up to which a worker's events were applied, or None if it has no entries."""
        holding = self._holdings.get(worker_id)
        return (holding.epoch, holding.sequence) if holding is not None else None

    def lookup(self, block_hashes: bytes) -> dict[str, int]:
        """Returns how many of the first blocks each worker holds without a gap, in any tier.

        Omits workers that hold none.
        """
        _, held = self._store.prefixes(fingerprints_of(block_hashes))
        names = self._names
        return {names[slot]: depth for slot, depth in ends_of(held, self._live_bits())} if held.size else {}

    def find(self, block_hashes: bytes) -> dict[str, HeldPrefix]:
        """Returns the same as `lookup`, by tier. A block in both tiers counts as on the device."""
        on_device, held = self._store.prefixes(fingerprints_of(block_hashes))
        if not held.size:
            return {}
        names, ends = self._names, ends_of(held, self._live_bits())
        if not self._store.uses_host:
            return {names[slot]: HeldPrefix(depth, 0) for slot, depth in ends}
        counts = sum_rows(on_device & held).tolist()
        return {names[slot]: HeldPrefix(counts[slot], depth - counts[slot]) for slot, depth in ends}

    def usable(
        self, worker_id: str, held: HeldPrefix, block_hashes: bytes, most: int, block_size: int, window: int
    ) -> HeldPrefix:
        """Returns the longest part, of at most `most` blocks, whose last `window` tokens every KV group holds."""
        holding = self._holdings.get(worker_id)
        if holding is None:
            return held
        most = min(most, held.device + held.host)
        usable = self._gaps.usable(holding.slot, block_hashes, most, block_size, window)
        device = min(held.device, usable)
        return HeldPrefix(device, usable - device)

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
                self._store.change(*changes.packed())
                changes = Changes()
                dropped[batch.worker_id] = dropped.get(batch.worker_id, 0) + self.drop(batch.worker_id)
                continue
            changes.add(holding.slot, batch.events)
            self._gaps.add(holding.slot, batch.events)
            holding.sequence = batch.sequence
        self._store.change(*changes.packed())
        return dropped

    def receive(self, part: kv_pb2.KvSnapshot) -> bool:
        """Takes a part of a worker's snapshot; the last one makes it count. False: the part does not belong here."""
        belongs = self.collect(part)
        self._absorb_all()
        return belongs

    def collect(self, part: kv_pb2.KvSnapshot) -> bool:
        """Applies the same as `receive`, but the last part counts only once `absorb` has returned False."""
        if part.first:
            self._begin(part)
        arrival = self._arriving.get(part.worker_id)
        if arrival is None or (arrival.holding.epoch, arrival.holding.sequence) != (part.epoch, part.barrier):
            self.drop(part.worker_id)
            return False
        self._gaps.hold(arrival.holding.slot, part)
        if not part.groups or 0 in part.groups:
            column = column_of(arrival.holding.slot, part.tier)
            arrival.pieces.setdefault(column, []).append(fingerprints_of(part.block_hashes))
        if part.last:
            self._absorbing[part.worker_id] = self._arriving.pop(part.worker_id)
            # In order, so that neighbours in time are neighbours in the table.
            arrival.sorted = [self._store.column(column, pieces) for column, pieces in arrival.pieces.items()]
            arrival.pieces.clear()
        return True

    def absorb(self, max_blocks: int) -> bool:
        """Stores up to `num_blocks` of complete snapshots. Returns False if none are left."""
        if not self._absorbing:
            return False
        worker_id, arrival = next(iter(self._absorbing.items()))
        if arrival.sorted:
            column = arrival.sorted[-1]
            self._store.store(column, max_blocks)
            if not column.fingerprints.size:
                arrival.sorted.pop()
                self._store.give_up(column)
        if not arrival.sorted:
            del self._absorbing[worker_id]
            self._retire(self._holdings.pop(worker_id, None))
            self._holdings[worker_id] = arrival.holding
            self._live = None
        return bool(self._absorbing)

    def mark_silent(self, worker_id: str) -> None:
        """Ignores the worker's entries, including later ones, until `mark_heard`."""
        if worker_id not in self._silent:
            self._silent.add(worker_id)
            self._live = None

    def mark_heard(self, worker_id: str) -> None:
        """Ends `mark_silent`."""
        if worker_id in self._silent:
            self._silent.remove(worker_id)
            self._live = None

    def is_silent(self, worker_id: str) -> bool:
        """Returns whether the worker's entries do not count now."""
        return worker_id in self._silent

    def drop(self, worker_id: str) -> int:
        """Drops a worker's entries at once and returns their number."""
        holding = self._holdings.pop(worker_id, None)
        self._retire(holding)
        self._end_arrivals(worker_id)
        return self._store.num_entries(holding.slot) if holding is not None else 0

    def clean(self, max_lines: int) -> bool:
        """Clears the bits of dropped workers in `num_lines` lines of the table. Returns False if none are left."""
        sweep = self._sweep
        if not sweep.slots:
            sweep = self._sweep = _Sweep(self._dying, 0)
            self._dying = []
        if sweep.slots:
            end = min(sweep.at + max_lines, self._store.num_lines)
            self._store.strip(sweep.slots, sweep.at, end)
            sweep.at = end
            is_clean = not any(map(self._store.num_entries, sweep.slots))
            if is_clean or end == self._store.num_lines:
                assert is_clean, "a swept slot still has entries"
                self._free_slots += sweep.slots
                self._sweep = _Sweep([], 0)
        return bool(self._sweep.slots or self._dying)

    def _live_bits(self) -> int:
        """Returns a bit for each slot that counts."""
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
                    self._store.give_up(column)
                self._retire(arrival.holding)

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
        slot = self._store.add_slot()
        self._live = None
        self._names.append(worker_id)
        return slot

    def _retire(self, holding: _Holding | None) -> None:
        if holding is None:
            return
        self._live = None
        self._gaps.drop(holding.slot)
        self._names[holding.slot] = ""
        if self._store.num_entries(holding.slot):
            self._dying.append(holding.slot)
        else:
            self._free_slots.append(holding.slot)


@dataclass(slots=True)
class _Sweep:
    """One pass over the table on behalf of these slots."""

    slots: list[int]
    at: int
