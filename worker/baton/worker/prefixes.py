"""Prompt blocks that are being computed right now, and who waits for them. Holds no blocks, decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.worker.core import BlockHash
from baton.worker.request_state import Phase, RequestState


@dataclass(slots=True)
class _Entry:
    holder: RequestState
    waiters: list[RequestState] = field(default_factory=list)


class PrefixesInProgress:
    """Which request computes which block. Every wait ends: by the block, or by the end of its holder's work on it."""

    def __init__(self) -> None:
        self._entries: dict[BlockHash, _Entry] = {}
        self._hashes_of: dict[RequestState, set[BlockHash]] = {}
        self._parked_at: dict[RequestState, BlockHash] = {}

    @property
    def num_parked(self) -> int:
        return len(self._parked_at)

    @property
    def parked(self) -> list[RequestState]:
        """Who waits."""
        return list(self._parked_at)

    def begin(self, holder: RequestState, block_hashes: list[BlockHash]) -> None:
        """The holder will compute these blocks. Blocks that another computes already stay with that one."""
        mine = self._hashes_of.setdefault(holder, set())
        for block_hash in block_hashes:
            if block_hash not in self._entries:
                self._entries[block_hash] = _Entry(holder)
                mine.add(block_hash)
        if not mine:
            del self._hashes_of[holder]

    def last_common(self, state: RequestState, start: int, stop: int) -> BlockHash | None:
        """The last of the request's blocks [start, stop) that others compute without a gap; None: not even the first.

        Only a request that wants a remote prefill itself waits for a remote one: others compute at once.
        """
        found: BlockHash | None = None
        for block_hash in state.block_hashes[start:stop]:
            entry = self._entries.get(block_hash)
            if entry is None or (entry.holder.phase is Phase.REMOTE and not state.wants_remote):
                break
            found = block_hash
        return found

    def park(self, state: RequestState, block_hash: BlockHash) -> None:
        """The request waits for the block."""
        self._entries[block_hash].waiters.append(state)
        self._parked_at[state] = block_hash

    def unpark(self, state: RequestState) -> None:
        """The request waits no more, for reasons of its own."""
        block_hash = self._parked_at.pop(state, None)
        if block_hash is not None:
            self._entries[block_hash].waiters.remove(state)

    def computed(self, block_hash: BlockHash) -> list[RequestState]:
        """The block can be found now. Returns who waited for it."""
        entry = self._entries.pop(block_hash, None)
        if entry is None:
            return []
        mine = self._hashes_of[entry.holder]
        mine.discard(block_hash)
        if not mine:
            del self._hashes_of[entry.holder]
        return self._wake(entry)

    def end(self, holder: RequestState) -> list[RequestState]:
        """The holder computes nothing more. Returns who waited for it."""
        woken: list[RequestState] = []
        for block_hash in self._hashes_of.pop(holder, ()):
            woken += self._wake(self._entries.pop(block_hash))
        return woken

    def _wake(self, entry: _Entry) -> list[RequestState]:
        for state in entry.waiters:
            del self._parked_at[state]
        return entry.waiters
