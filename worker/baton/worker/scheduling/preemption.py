"""Takes rows and blocks from running requests, which are queued again and recomputed later."""

from __future__ import annotations

from collections import Counter

from baton.worker.kv.holdings import Holdings
from baton.worker.requests.outputs import EngineCounters
from baton.worker.requests.state import NO_ROW, Phase, RequestState
from baton.worker.scheduling.placement import Placement
from baton.worker.scheduling.queues import RequestQueues
from baton.worker.scheduling.steps.draft import Draft


class Preemption:
    """Preempts the least urgent requests, of the tenant that holds most."""

    def __init__(
        self,
        holdings: Holdings,
        queues: RequestQueues,
        placement: Placement,
        counters: EngineCounters,
        prefix_caching: bool,
    ) -> None:
        self._holdings = holdings
        self._queues = queues
        self._batch = queues.batch
        self._placement = placement
        self._counters = counters
        self._prefix_caching = prefix_caching

    def victim(self) -> RequestState | None:
        """Returns the request to preempt: among the least urgent, one of the tenant that holds most.

        A prefill for another worker is not preempted: its blocks are promised to a peer.
        """
        candidates = [state for state in self._batch.running() if not state.request.prefill_only]
        if not candidates:
            return None
        priority = max([state.rank[0] for state in candidates])
        last = [state for state in candidates if state.rank[0] == priority]
        num_held: Counter[str] = Counter()
        for state in last:
            num_held[state.request.tenant] += len(state.block_ids)
        return max(last, key=lambda state: (num_held[state.request.tenant], state.rank))

    def victim_for(self, state: RequestState) -> RequestState | None:
        """Returns the request to preempt for this one. None: no less urgent one runs."""
        priority = state.rank[0]
        if not any(one.rank[0] > priority for one in self._batch.running()):
            return None  # in most steps of full batches
        victim = self.victim()
        return victim if victim is not None and victim.rank[0] > state.rank[0] else None

    def preempt(self, state: RequestState, draft: Draft) -> None:
        """Takes the request's row, if any, and its blocks, and queues it."""
        if state.row != NO_ROW:
            draft.take_out(state, self._batch.remove(state))
        woken = self._holdings.free_early(state)
        state.caching = self._prefix_caching
        state.phase = Phase.WAITING
        state.restored = False
        state.min_free = 0
        state.num_preemptions += 1
        self._counters.num_preemptions += 1
        self._queues.waiting.push(state)
        self._placement.wake([*woken, *self._holdings.prefixes.end(state)])

    def free_blocks(self, state: RequestState, num_blocks: int, draft: Draft) -> bool:
        """Provides a row and blocks, at the cost of less urgent running requests only."""
        pool = self._holdings.pool
        while True:
            watermark = self._holdings.watermark if num_blocks and len(self._batch) else 0
            if self._batch.num_free_rows and pool.num_free >= num_blocks + watermark:
                return True
            victim = self.victim_for(state)
            if victim is None:
                return False
            self.preempt(victim, draft)
