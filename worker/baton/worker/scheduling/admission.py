"""Gives requests rows, blocks and the prompt tokens of a step.

Admission takes the blocks of all known tokens at once, so only decodes need more later.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.worker.core import RowInit
from baton.worker.kv.holdings import Holdings
from baton.worker.kv.partial_groups import spans_of
from baton.worker.requests.outputs import EngineCounters, PrefillStarted
from baton.worker.requests.state import Phase, Rank, RequestState
from baton.worker.scheduling.awaited_kv import AwaitedKv
from baton.worker.scheduling.background import Background
from baton.worker.scheduling.partial_prefills import PartialPrefills
from baton.worker.scheduling.placement import Placement
from baton.worker.scheduling.preemption import Preemption
from baton.worker.scheduling.queues import RequestQueues
from baton.worker.scheduling.steps.draft import Draft
from baton.worker.scheduling.tenants.shares import Admission, TenantShares


class Admissions:
    """Continues and admits prompts, by rank, or in shares if several tenants have some."""

    def __init__(
        self,
        holdings: Holdings,
        queues: RequestQueues,
        awaited_kv: AwaitedKv,
        placement: Placement,
        preemption: Preemption,
        partial: PartialPrefills,
        background: Background,
        counters: EngineCounters,
        clock: Callable[[], float],
        dummy_kv: bool = False,
    ) -> None:
        self._holdings = holdings
        self._pool = holdings.pool
        self._queues = queues
        self._batch = queues.batch
        self._awaited_kv = awaited_kv
        self._placement = placement
        self._preemption = preemption
        self._partial = partial
        self._background = background
        self._counters = counters
        self._clock = clock
        self._dummy_kv = dummy_kv  # whether prompts count as computed up to their last token
        self._shares = TenantShares(queues)
        self._pin_blocked: Rank | None = None  # of a request that waits for pinned blocks since the last step

    def may_lease(self, state: RequestState) -> bool:
        """Returns whether no request of a better rank waits for pinned blocks: leases pin more of them."""
        return self._pin_blocked is None or self._pin_blocked >= state.rank

    def begin_step(self) -> None:
        """Lets requests that waited for pinned blocks try again."""
        self._pin_blocked = None
        self._background.begin_step()

    def prefill(self, draft: Draft) -> None:
        """Continues and admits prompts. Admits none after a preemption."""
        if not self._queues.has_prompts:
            self._shares.reset()
            return
        if self._shares.wanted():
            self._partial.take_back(draft)
            admits = not draft.preempted and self._admit_ready_ones(draft) is not Admission.NO_CAPACITY
            self._shares.divide(draft, self._schedule_chunk, self._try_to_admit if admits else None)
            return
        for state in self._batch.prefilling:
            if draft.budget <= 0:
                return
            self._schedule_chunk(state, draft)
        self._partial.take_back(draft)
        if not draft.preempted and self._admit_ready_ones(draft) is Admission.DONE:
            self._admit_by_rank(draft)

    def _schedule_chunk(self, state: RequestState, draft: Draft) -> None:
        """Gives the request all tokens that are left, beside those that it has, or as many as it needs and may."""
        if state in draft.waiting:
            return
        given = draft.chunks.get(state, 0)
        start = int(self._batch.num_computed[state.row])
        remaining = len(state.token_ids) - start
        wanted = given + max(0, self._partial.chunk(remaining, given, draft.budget))
        wanted = self._holdings.partial.chunk_end(state, start, start + wanted) - start
        more = self._background.take(state, max(0, wanted - given))
        if more > 0:
            draft.chunks[state] = given + more
            draft.budget -= more

    def _admit_ready_ones(self, draft: Draft) -> Admission:
        """Admits remotely prefilled requests, in order, while there is capacity."""
        while draft.budget > 0 and (state := self._queues.ready.peek()) is not None:
            if state.mask_pending:
                return Admission.NOT_YET
            if not self._admit_ready(state, draft):
                return Admission.NO_CAPACITY
        return Admission.DONE

    def _admit_by_rank(self, draft: Draft) -> None:
        while draft.budget > 0 and (state := self._queues.waiting.peek()) is not None:
            if self._try_to_admit(state, draft) is not Admission.DONE:
                return
        if (state := self._queues.waiting.peek()) is not None:
            self._placement.want_snapshots(state)

    def _try_to_admit(self, state: RequestState, draft: Draft) -> Admission:
        # All tokens of a preempted request are known only when its last step is collected.
        unready = state.last_step > self._holdings.collected_step or state.mask_pending
        if unready or self._background.waits(state):
            return Admission.NOT_YET
        return self._admit_waiting(state, draft)

    def _admit_ready(self, state: RequestState, draft: Draft) -> bool:
        """Admits a remotely prefilled request.

        An accepted first token may need one more block. Returns False without capacity.
        """
        num_blocks = self._holdings.num_blocks_of(state)
        num_computed = min(state.num_remote_tokens, len(state.token_ids) - 1)
        self._holdings.free_passed(state, num_computed, draft.step - 1)
        missing = self._holdings.partial.num_ahead(state, num_computed, num_blocks)
        num_full = num_blocks - len(state.block_ids)
        num_fresh = num_full + self._holdings.partial.num_pages(missing)
        if not self._preemption.free_blocks(state, num_fresh, draft):
            return False
        fresh = self._holdings.allocate(num_fresh)
        state.block_ids += fresh[:num_full]
        self._holdings.partial.append(self._pool, state.partial, fresh[num_full:], missing)
        self._start(state, num_computed, draft)
        return True

    def _admit_waiting(self, state: RequestState, draft: Draft) -> Admission:
        """Admits, parks or sets aside a request, if there is capacity."""
        if len(self._batch) and self._pool.num_free < state.min_free and self._preemption.victim_for(state) is None:
            return Admission.NO_CAPACITY
        hits = self._holdings.cached_prefix(state)
        if self._placement.park(state, len(hits)):
            self._queues.waiting.discard(state)
            return Admission.DONE
        num_uncached = len(state.token_ids) - len(hits) * self._holdings.block_size
        if self._partial.set_aside(state, num_uncached, draft):
            return Admission.DONE
        if self._partial.waits(num_uncached, draft):
            return Admission.NOT_YET
        num_cached_tokens = len(hits) * self._holdings.block_size
        num_computed = len(state.token_ids) - 1 if self._dummy_kv else num_cached_tokens
        num_full = self._holdings.num_blocks_of(state) - len(hits)
        partial = self._holdings.partial.needs(self._pool, state, len(hits), num_computed)
        num_fresh = num_full + partial.num_missing
        if not self._fits_beside_pinned(state):
            self._pin_blocked = state.rank
            return Admission.HELD
        found = [*hits, *partial.found_ids]
        state.min_free = num_fresh + self._pool.count_unheld(found)
        self._pool.touch(found)
        if not self._preemption.free_blocks(state, num_fresh, draft):
            self._pool.free(found)
            return Admission.NO_CAPACITY
        if self._awaited_kv.restore(state, hits, found):
            self._queues.waiting.discard(state)
            return Admission.DONE
        fresh = self._holdings.allocate(num_fresh)
        state.block_ids = hits + fresh[:num_full]
        state.partial = partial.found
        self._holdings.partial.append(self._pool, state.partial, fresh[num_full:], partial.missing)
        state.num_stored_blocks = len(hits)
        if state.started is None and not state.num_remote_tokens:
            state.num_cached_tokens = num_cached_tokens
            self._counters.count_prompt(len(state.token_ids), num_cached_tokens)
        # The same prompt continues there when it comes again.
        self._holdings.partial.want_snapshot(state, self._holdings.num_reusable(state))
        self._holdings.partial.want_snapshot(state, len(hits))  # others may share what this one has found
        self._holdings.prefixes.begin(state, len(hits), len(state.block_hashes))
        self._start(state, num_computed, draft)
        return Admission.DONE

    def _fits_beside_pinned(self, state: RequestState) -> bool:
        """Returns whether the request can finish beside pinned blocks, and all running ones beside its own."""
        pinned = self._holdings.pinned
        if state.request.prefill_only:
            return pinned.would_fit(state, pinned.lifetime_blocks(state), self._queues.must_fit())
        return pinned.can_finish(state)

    def _start(self, state: RequestState, num_computed: int, draft: Draft) -> None:
        """Gives the request a row and its first chunk."""
        self._queues.waiting.discard(state)
        self._queues.ready.discard(state)
        state.phase = Phase.RUNNING
        if state.started is None:
            state.started = self._clock()
        row = self._batch.add(state, num_computed, len(state.block_ids) * self._holdings.block_size)
        request = state.request
        draft.admitted[row] = RowInit(
            row,
            request.token_ids.array(),
            request.num_prompt_tokens,
            request.sampling,
            request.pooling,
            request.cache_namespace,
            adapter_slot=state.adapter_slot,
        )
        draft.new_blocks[row] = list(state.block_ids)
        if request.prefill_only:
            draft.started[state] = PrefillStarted(
                request, num_computed, list(state.block_ids), row, draft.step, spans_of(state.partial)
            )
        self._queues.stalled = False
        self._holdings.pin(state)
        self._background.start(state)
        self._schedule_chunk(state, draft)
