"""Requests that wait for KV from a prefill worker, or from host memory.

Calls that end a wait return the other requests that may continue.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from baton.worker.core import BlockId
from baton.worker.kv.holdings import Holdings
from baton.worker.kv.host_tier.restorable import Restorable
from baton.worker.requests.outputs import EngineCounters
from baton.worker.requests.state import Phase, RequestState
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
        needed = self._holdings.num_to_lease(state)
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
        if state.phase is Phase.DONE:
            # Its prefix was freed with it: the settled blocks are the prompt's last ones.
            self._holdings.settle_ended(state)
            self._holdings.pin(state)
            return
        state.num_transferred_tokens = state.num_remote_tokens - len(state.block_ids) * self._block_size
        self._counters.num_transferred_tokens += state.num_transferred_tokens
        self._holdings.settle(state)
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
        prefix = self._find_prefix(state, hits)
        if prefix is None:
            return False
        needed = len(prefix.slots) + self._pool.count_unheld(prefix.held) + self._holdings.watermark
        if self._pool.num_free < needed:
            return False
        self._pool.touch(prefix.held)
        self._begin_restore(state, prefix)
        return True

    def restore(self, state: RequestState, hits: list[BlockId], held: list[BlockId]) -> bool:
        """Begins a restore, if it pays and fits, and takes over the hold of `held`, which are in all groups."""
        prefix = self._find_prefix(state, hits)
        if prefix is None:
            return False
        more = _without(prefix.held, held)
        if self._pool.num_free < len(prefix.slots) + self._pool.count_unheld(more):
            return False
        self._pool.touch(more)
        self._pool.free(_without(held, prefix.held))
        self._begin_restore(state, prefix)
        return True

    def _find_prefix(self, state: RequestState, hits: list[BlockId]) -> Restorable | None:
        """Returns a prefix that is worth a restore."""
        if not self._restores.possible(state):
            return None
        prefix = self._holdings.restorable(state, hits)
        return prefix if prefix is not None and self._restores.pays(prefix) else None

    def _begin_restore(self, state: RequestState, prefix: Restorable) -> None:
        """Makes the request wait until the prefix is on the device. Takes over the hold of its blocks."""
        pages = self._holdings.allocate(len(prefix.slots), in_order=False)
        rest = iter(pages)
        fresh = [self._pool.join(list(islice(rest, size))) for size in prefix.sizes]
        state.phase = Phase.RESTORING
        state.restored = True
        self._restores.begin(state, prefix, fresh, pages, fenced=self._holdings.fenced)
        self._holdings.prefixes.begin(state, prefix.start, prefix.stop)

    def end_restore(self, restore_id: int, landed: bool) -> tuple[int, list[RequestState]]:
        """Ends a restore, whose copy is complete or has failed.

        Returns its number of blocks, and the requests that waited.
        """
        restore = self._restores.end(restore_id)
        state, prefix = restore.state, restore.prefix
        woken = [] if state is None else [state, *self._holdings.prefixes.end(state)]
        if landed and restore.wanted:
            if state is not None:
                self._holdings.note_origins(state, prefix.start, prefix.stop)
            self._pool.store(restore.fresh, prefix.keys)
            if state is not None:
                self._counters.num_host_hit_tokens += (prefix.stop - prefix.start) * self._block_size
        self._pool.free(restore.block_ids)
        return len(restore.slots), woken


def _without(block_ids: list[BlockId], others: list[BlockId]) -> list[BlockId]:
    """Returns the blocks that are not among the others, in order."""
    known = set(others)
    return [block_id for block_id in block_ids if block_id not in known]
