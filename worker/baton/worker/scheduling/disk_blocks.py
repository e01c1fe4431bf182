"""Which blocks go from host memory to disk and back, and the requests that wait for that. Copies nothing.

Every block that is copied to host memory is written to disk after it, unless it is there. A request whose prefix goes
on there, behind what the device and host memory have, waits without a row until its blocks are in host memory; then it
is placed again, and finds them. It waits for one load only, so that it cannot wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.worker.core import BlockHash, HostSlot
from baton.worker.kv.disk_tier.tier import DiskTier, Ended
from baton.worker.kv.holdings import Holdings
from baton.worker.requests.state import Phase, RequestState
from baton.worker.scheduling.restores import RestoreCost

_PART = 4  # of the host slots: what writes may read at a time; loads fill twice that


@dataclass(slots=True, eq=False)
class Load:
    """Blocks that are read together."""

    states: list[RequestState]  # that wait; empty once these have ended
    started: float
    num_slots: int
    slots: dict[BlockHash, tuple[HostSlot, ...]] = field(default_factory=dict)  # of the blocks that have not ended


class DiskBlocks:
    """Writes to begin and loads in progress."""

    def __init__(self, disk: DiskTier, holdings: Holdings, cost: RestoreCost, clock: Callable[[], float]) -> None:
        self.disk = disk
        self.cost = cost
        self._holdings = holdings
        self._offloads = holdings.offloads
        self._tier = holdings.offloads.tier
        self._clock = clock
        self._kept: dict[BlockHash, None] = {}  # not written yet, the oldest first
        self._writing: dict[tuple[int, BlockHash], tuple[HostSlot, ...]] = {}  # by generation; pinned
        self._loads: dict[BlockHash, Load] = {}  # by each block that has not ended
        self._begun: list[tuple[BlockHash, tuple[HostSlot, ...]]] = []
        self._tier.on_kept = self._note

    @property
    def states(self) -> list[RequestState]:
        """Returns the requests that wait."""
        return [state for load in set(self._loads.values()) for state in load.states]

    @property
    def loading(self) -> bool:
        """Whether blocks are being read."""
        return bool(self._loads)

    @property
    def written_slots(self) -> list[Sequence[HostSlot]]:
        """The slots that writes read."""
        return list(self._writing.values())

    # Loads.

    def wait_for(self, state: RequestState) -> bool:
        """Makes the request wait until blocks of its prefix are read, if that pays. False: it does not wait."""
        if state.loaded or not state.caching or not len(self.disk.index):
            return False
        usable, stop = self._prefix(state)
        if stop <= usable:
            return False
        wanted = [key for key in self._needed(state, stop) if not self._is_here(key)]
        other = next((self._loads[key] for key in wanted if key in self._loads), None)
        if other is None and not self._begin(state, wanted, stop - usable):
            return False
        if other is not None:
            other.states.append(state)
        state.phase = Phase.RESTORING
        return True

    def take_reads(self) -> list[tuple[BlockHash, tuple[HostSlot, ...]]]:
        """Returns the blocks to read now, and the slots to fill."""
        begun, self._begun = self._begun, []
        return begun

    def leave(self, state: RequestState) -> None:
        """Ends a request's wait. What is being read stays in host memory."""
        for load in set(self._loads.values()):
            if state in load.states:
                load.states.remove(state)

    # Writes.

    def take_writes(self) -> Iterator[tuple[BlockHash, tuple[HostSlot, ...]]]:
        """Yields the blocks to write now. Their slots are pinned until `ended`, or `refused`."""
        most = max(1, self._tier.num_slots // _PART)
        while self._kept and sum(map(len, self._writing.values())) < most:
            key = next(iter(self._kept))
            del self._kept[key]
            slots = tuple(self._tier.lookup([key]))
            if not slots:
                self.disk.counters.num_dropped_blocks += 1
                continue
            self._tier.pin(slots)
            self._writing[self.disk.generation, key] = slots
            yield key, slots

    def refused(self, key: BlockHash) -> None:
        """Records that a block has no room on disk."""
        self._tier.unpin(self._writing.pop((self.disk.generation, key)))
        self.disk.counters.num_dropped_blocks += 1

    # Both.

    def ended(self, ended: Ended) -> list[RequestState]:
        """Records that a file was written or read. Returns the requests that waited for nothing else."""
        if not ended.is_read:
            self._tier.unpin(self._writing.pop((ended.generation, ended.key)))
            return []
        load = self._loads.pop(ended.key)
        slots = load.slots.pop(ended.key)
        if ended.succeeded:
            for slot in slots:
                self._tier.landed(slot)
        else:
            self._offloads.load_failed(slots)
        if load.slots:
            return []
        self.cost.observe(load.num_slots, self._clock() - load.started)
        return load.states

    def reset(self) -> None:
        """Forgets all blocks. Requests wait until what is being read has ended."""
        self._kept.clear()
        self.disk.reset()

    def _note(self, key: BlockHash) -> None:
        """Records that a block is in host memory now."""
        if key in self.disk.index:
            self.disk.index.touch(key)
            return
        self._kept[key] = None
        if len(self._kept) > self._tier.num_slots:
            del self._kept[next(iter(self._kept))]
            self.disk.counters.num_dropped_blocks += 1

    def _prefix(self, state: RequestState) -> tuple[int, int]:
        """Returns the blocks of the prefix that is usable now, and of the one that is so after a load."""
        partial, hashes = self._holdings.partial, state.block_hashes[: self._holdings.num_reusable(state)]
        here = _count(hashes, self._is_here)
        most = here + 2 * self._tier.num_slots // _PART
        there = here + _count(hashes[here:most], self._is_near)
        if not partial:
            return here, there
        usable = partial.usable(lambda keys: self._is_here(keys[0]), state, here)
        return usable, partial.usable(lambda keys: self._is_near(keys[0]), state, there)

    def _needed(self, state: RequestState, stop: int) -> list[BlockHash]:
        partial = self._holdings.partial
        return [*state.block_hashes[:stop], *(partial.keys_before(state, stop) if partial else ())]

    def _is_here(self, key: BlockHash) -> bool:
        return bool(self._holdings.pool.lookup([key]) or self._tier.lookup([key]))

    def _is_near(self, key: BlockHash) -> bool:
        return self._is_here(key) or key in self._loads or (key in self.disk.index and key not in self._tier)

    def _begin(self, state: RequestState, wanted: Sequence[BlockHash], num_blocks: int) -> bool:
        index, folder = self.disk.index, self.disk.folder
        sizes = {key: folder.num_slots_of(index.size(key)) for key in wanted}
        num_slots = sum(sizes.values())
        ahead = sum(len(slots) for load in set(self._loads.values()) for slots in load.slots.values())
        if not self.cost.pays(num_blocks * self._holdings.block_size, num_slots, ahead):
            return False
        for key in reversed(state.block_hashes):
            self._tier.use(key)  # what is in host memory already is not evicted for the rest
        load = Load([state], self._clock(), num_slots)
        for key, size in sizes.items():
            slots = self._offloads.load(key, size)
            if slots is None:
                break  # copies are in progress in too many slots
            load.slots[key] = slots
            self._loads[key] = load
        self._begun += load.slots.items()
        state.loaded = bool(load.slots)
        return state.loaded


def _count(keys: Sequence[BlockHash], has: Callable[[BlockHash], bool]) -> int:
    """Returns how many of the first keys have this."""
    return next((index for index, key in enumerate(keys) if not has(key)), len(keys))
