"""Requests that wait for KV from a prefill worker, or from host memory.

Calls that end a wait return the other requests that may continue.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.worker.core import BlockId, HostSlot
from baton.worker.kv.holdings import Holdings
from baton.worker.requests.outputs import EngineCounters
from baton.worker.requests.state import Phase, RequestState, num_blocks_for
from baton.worker.scheduling.queues import RequestQueues
from baton.worker.scheduling.restores import Restores
from baton.worker.scheduling.settings import EngineSettings


class AwaitedKv:
    """Remote prefills and restores."""

    def __init__(
        self,
        holdings: Holdings,
        queues: RequestQueues,
        restores: Restores,
        settings: EngineSettings,
        counters: EngineCounters,
        clock: Callable[[], float],
    ) -> None:
        self._holdings = holdings
        self._pool = holdings.pool
        self._queues = queues
        self._restores = restores
        self._block_size = holdings.block_size
        self._settings = settings
        self._counters = counters
        self._clock = clock

    # Remote prefills.

    def start_remote(self, state: RequestState, hits: list[BlockId]) -> bool:
        """Begins a remote prefill, and holds the cached prefix. False: enough is cached, or the blocks do not fit."""
        num_cached_tokens = len(hits) * self._block_size
        if len(state.token_ids) - num_cached_tokens < self._settings.min_remote_prefill_tokens:
            return False
        if not self._holdings.pinned.would_fit(state, len(hits), self._queues.must_fit()):
            return False
        self._pool.touch(hits)
        state.block_ids = hits
        state.num_stored_blocks = len(hits)
        state.num_cached_tokens = num_cached_tokens
        state.num_remote_tokens = len(state.token_ids)
        state.phase = Phase.REMOTE
        self._queues.remote[state] = None
        self._holdings.pin(state)
        self._holdings.prefixes.begin(state, len(hits), len(state.block_hashes))
        self._counters.count_prompt(len(state.token_ids), num_cached_tokens)
        return True

    def reserve(self, state: RequestState) -> list[BlockId] | None:
        """Leases the rest of a remote prefill's blocks, if every running request can still finish."""
        if state.leased:
            return list(state.leased)
        needed = num_blocks_for(state.num_remote_tokens, self._block_size) - len(state.block_ids)
        if self._holdings.fenced or needed + len(self._queues.batch) > self._pool.num_free:
            return None
        if not self._holdings.pinned.would_fit(state, needed, [*self._queues.must_fit(), state]):
            return None
        leased = self._pool.lease(needed)
        assert leased is not None, "num_free counts enough blocks"
        state.leased = leased
        state.started = self._clock()
        self._holdings.pin(state)
        return list(leased)

    def finish_remote(self, state: RequestState) -> None:
        """Turns leased blocks into valid ones. Those of a request that has ended stay in the cache."""
        self._pool.settle(state.leased)
        settled, state.leased = state.leased, []
        if state.phase is Phase.DONE:
            # Its prefix was freed with it: the settled blocks are the prompt's last ones.
            self._holdings.store_ended(state, settled)
            self._holdings.pin(state)
            return
        state.num_transferred_tokens = state.num_remote_tokens - len(state.block_ids) * self._block_size
        self._counters.num_transferred_tokens += state.num_transferred_tokens
        state.block_ids += settled
        self._queues.remote.pop(state, None)
        state.phase = Phase.READY  # the same blocks stay pinned
        self._queues.ready.push(state)
        self._holdings.store_soon(state, state.num_remote_tokens)

    def free_lease(self, state: RequestState) -> None:
        """Frees the leased blocks: they are no longer written."""
        self._pool.free_lease(state.leased)
        state.leased = []
        self._holdings.pin(state)

    # Host memory.

    def restore_first(self, state: RequestState, hits: list[BlockId]) -> bool:
        """Begins a restore before a remote prefill, if it pays and the blocks fit."""
        slots = self._find_slots(state, hits)
        needed = len(slots) + self._pool.count_unheld(hits) + self._holdings.watermark
        if not slots or self._pool.num_free < needed:
            return False
        self._pool.touch(hits)
        self._begin_restore(state, hits, slots)
        return True

    def restore(self, state: RequestState, hits: list[BlockId]) -> bool:
        """Begins a restore, if it pays, and takes over the hold of `hits`. The blocks must fit."""
        slots = self._find_slots(state, hits)
        if slots:
            self._begin_restore(state, hits, slots)
        return bool(slots)

    def _find_slots(self, state: RequestState, hits: list[BlockId]) -> list[HostSlot]:
        return self._restores.find(state, len(hits), self._holdings.num_reusable(state))

    def _begin_restore(self, state: RequestState, hits: list[BlockId], slots: list[HostSlot]) -> None:
        """Makes the request wait until these slots are on the device. Takes over the hold of `hits`."""
        fresh = self._holdings.allocate(len(slots), in_order=False)
        state.phase = Phase.RESTORING
        state.restored = True
        self._restores.begin(state, hits, fresh, slots, fenced=self._holdings.fenced)
        self._holdings.prefixes.begin(state, len(hits), len(hits) + len(slots))

    def end_restore(self, restore_id: int, landed: bool) -> tuple[int, list[RequestState]]:
        """Ends a restore, whose copy is complete or has failed.

        Returns its number of blocks, and the requests that waited.
        """
        restore = self._restores.end(restore_id)
        state = restore.state
        woken = [] if state is None else [state, *self._holdings.prefixes.end(state)]
        if landed and restore.wanted:
            if state is not None:
                first = len(restore.block_ids) - len(restore.slots)
                self._holdings.note_origins(state, first, first + len(restore.slots))
            self._pool.store(restore.fresh, restore.block_hashes)
            if state is not None:
                self._counters.num_host_hit_tokens += len(restore.slots) * self._block_size
        self._pool.free(restore.block_ids)
        return len(restore.slots), woken
