"""Finds each request its place: when it arrives, and when what it waited for has come or failed.

A request whose prefix another computes waits for it; others begin a remote prefill or a restore, or queue for a row.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.worker.kv.holdings import Holdings
from baton.worker.requests.outputs import PrefillWanted
from baton.worker.requests.state import Phase, RequestState
from baton.worker.scheduling.awaited_kv import AwaitedKv
from baton.worker.scheduling.disk_blocks import DiskBlocks
from baton.worker.scheduling.queues import RequestQueues


class Placement:
    """Moves requests between the queues. Gives none a row."""

    def __init__(
        self, holdings: Holdings, queues: RequestQueues, awaited_kv: AwaitedKv, disk: DiskBlocks | None = None
    ) -> None:
        self.prefill_wanted: list[PrefillWanted] = []
        self._holdings = holdings
        self._queues = queues
        self._awaited_kv = awaited_kv
        self._disk = disk

    def place(self, state: RequestState) -> None:
        """Places a new or woken request: it begins a remote prefill, waits for a prefix, or is queued."""
        self._queues.stalled = False
        self._queues.compiling.discard(state)
        state.phase = Phase.WAITING
        self.want_snapshots(state)
        if self._disk is not None and self._disk.wait_for(state):
            return
        if state.wants_remote:
            hits = self._holdings.cached_prefix(state)
            if self.park(state, len(hits)) or self._awaited_kv.restore_first(state, hits):
                return
            state.wants_remote = False
            if self._awaited_kv.start_remote(state, hits):
                self.prefill_wanted.append(PrefillWanted(state.request, state.num_cached_tokens))
                return
        self._queues.waiting.push(state)

    def park(self, state: RequestState, num_hits: int) -> bool:
        """Makes the request wait if another computes more of its prefix than is cached. False: none does."""
        prefixes = self._holdings.prefixes
        common = prefixes.last_common(state, num_hits, self._holdings.num_reusable(state))
        if common is None:
            return False
        state.phase = Phase.PARKED
        self._holdings.partial.want_snapshot(common.holder, common.last + 1)
        prefixes.park(state, common)
        return True

    def want_snapshots(self, state: RequestState) -> None:
        """Makes others that compute a part of the request's prefix keep their states where the two part."""
        if self._holdings.partial.has_states and state.caching:
            for holder, last in self._holdings.prefixes.commons(state):
                self._holdings.partial.want_snapshot(holder, last + 1)

    def wake(self, woken: Iterable[RequestState]) -> None:
        """Places these requests again, the most urgent first."""
        for state in sorted(woken, key=lambda other: other.rank):
            self.place(state)
