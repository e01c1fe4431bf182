"""Decides what runs in the next step, and with which blocks. Owns every request's place; knows no device.

Requests wait by rank; tenants share the prompt tokens of a step. Admission takes the blocks of all known tokens at
once, so only decodes need more later. When there are none, a running request of the largest rank is preempted, of the
tenant that holds most, and recomputed later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from baton.worker.core import BlockId, Int32, Row, RowInit, TokenMasks
from baton.worker.kv.holdings import Holdings
from baton.worker.requests.outputs import EngineCounters, PrefillStarted, PrefillWanted
from baton.worker.requests.state import NO_ROW, Phase, RequestState, num_blocks_for
from baton.worker.scheduling.awaited_kv import AwaitedKv
from baton.worker.scheduling.follow_pace import FollowPace
from baton.worker.scheduling.queues import RequestQueues
from baton.worker.scheduling.rates import Rates
from baton.worker.scheduling.restores import RestoreCost, Restores
from baton.worker.scheduling.settings import EngineSettings
from baton.worker.scheduling.step_draft import Draft, ScheduledStep
from baton.worker.scheduling.step_masks import token_masks
from baton.worker.scheduling.tenant_shares import Admission, TenantShares


class Scheduler:
    """Continuous batching with chunked prefill, prefix reuse, preemption and remote prefills."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        settings: EngineSettings,
        counters: EngineCounters,
        clock: Callable[[], float],
        num_host_slots: int = 0,
        rates: Rates | None = None,
        max_step_tokens: int = 1,  # of one decode
    ) -> None:
        num_ahead = _num_ahead(num_blocks, num_host_slots, settings.max_num_batched_tokens, block_size)
        self._holdings = Holdings(num_blocks, block_size, max_model_len, num_host_slots, num_ahead)
        self.offloads = self._holdings.offloads
        self.pool = self._holdings.pool
        cost = RestoreCost(rates or Rates(), settings.min_host_hit_tokens)
        self.restores = Restores(self.offloads.tier, cost, block_size)
        self.queues = RequestQueues(settings.max_num_requests, max_step_tokens)
        self.batch = self.queues.batch
        self._shares = TenantShares(self.queues)
        self._follow_pace = FollowPace()
        self.prefill_wanted: list[PrefillWanted] = []  # the engine takes them
        self.stalled = False  # the last schedule found nothing that fits, and nothing has changed since
        self._prefixes = self._holdings.prefixes
        self._awaited_kv = AwaitedKv(self._holdings, self.queues, self.restores, block_size, settings, counters, clock)
        self._block_size = block_size
        self._settings = settings
        self._counters = counters
        self._clock = clock
        self._watermark = max(1, num_blocks // 100)  # blocks kept for decodes at an admission
        self._step = 0
        self._pin_blocked: tuple[int, float, int] | None = None  # rank of a request that waits for pinned blocks

    # For the engine.

    @property
    def num_queued(self) -> int:
        """Requests without a row that need one."""
        return self.queues.num_waiting + len(self.restores.states) + self._prefixes.num_parked

    @property
    def storing(self) -> bool:
        """Whether steps make received blocks findable."""
        return self._holdings.storing

    def runnable(self) -> bool:
        """Whether schedule may find something."""
        return len(self.batch) > 0 or self._may_admit() or self.storing

    def can_go_on(self) -> bool:
        """Whether schedule may find something besides requests that wait for their masks."""
        return len(self.batch) > self.batch.num_held or self._may_admit()

    def queued(self) -> list[RequestState]:
        """Returns the requests of num_queued."""
        return [*self.queues.list_waiting(), *self.restores.states, *self._prefixes.parked]

    def check_integrity(self, states: list[RequestState]) -> None:
        """Raises DataLoss unless exactly these requests hold and lease the pool's blocks."""
        self._holdings.check_integrity(states, self.restores.holds)
        self.restores.audit()

    # Adding and removing requests.

    def compile_first(self, state: RequestState) -> None:
        """Holds a new request until `place`, while its grammar is compiled."""
        state.phase = Phase.COMPILING
        self.queues.compiling.add(state)

    def place(self, state: RequestState) -> None:
        """Places a new or woken request: it begins a remote prefill, waits for a prefix, or is queued."""
        self.stalled = False
        self.queues.compiling.discard(state)
        state.phase = Phase.WAITING
        if state.wants_remote:
            num_reusable = self._num_reusable(state)
            hits = self.pool.lookup(state.block_hashes[:num_reusable])
            if self._park(state, len(hits)):
                return
            if self._awaited_kv.restore_first(state, hits, num_reusable, self._watermark):
                return
            state.wants_remote = False
            if self._awaited_kv.start_remote(state, hits):
                self._count_admission(state)
                self.prefill_wanted.append(PrefillWanted(state.request, state.num_cached_tokens))
                return
        self.queues.waiting.push(state)

    def retire(self, state: RequestState) -> None:
        """Removes a request that has ended. Its lease, if any, stays until free_lease."""
        if state.phase is Phase.PARKED:
            self._prefixes.unpark(state)
        elif state.phase is Phase.RESTORING:
            self.restores.leave(state)
        self.queues.dequeue(state)
        if state.row != NO_ROW:
            self.batch.remove(state)
        state.phase = Phase.DONE
        woken = self._holdings.free(state, self._step)
        self._pin(state)
        self._wake([*woken, *self._prefixes.end(state)])

    def hold(self, state: RequestState) -> None:
        """Frees the row of a computed prefill_only request; its blocks stay until it retires."""
        self.batch.remove(state)
        state.phase = Phase.HOLDING
        self.stalled = False
        self._wake(self._prefixes.end(state))

    def release(self, state: RequestState) -> None:
        """Records that the tokens that may follow the request's last one are known."""
        self.stalled = False
        if state.row != NO_ROW:
            self.batch.release(state.row)

    # Remote prefills.

    def reserve(self, state: RequestState) -> list[BlockId] | None:
        """Leases the rest of a remote prefill's blocks, if every running request can still finish."""
        if not state.leased and self._pin_blocked is not None and self._pin_blocked < state.rank:
            return None
        leased = self._awaited_kv.reserve(state)
        if leased is not None:
            self.stalled = False
        return leased

    def finish_transfer(self, state: RequestState) -> None:
        """Turns leased blocks into valid ones. Those of a request that has ended stay in the cache."""
        self.stalled = False
        self._awaited_kv.finish_remote(state)

    def prefill_locally(self, state: RequestState) -> None:
        """Abandons a remote prefill."""
        self.free_lease(state)
        self.queues.remote.pop(state, None)
        woken = self._holdings.free(state, self._step)
        state.phase = Phase.WAITING
        state.started = None
        state.caching = self._settings.prefix_caching
        self._pin(state)
        self.queues.waiting.push(state)
        self._wake([*woken, *self._prefixes.end(state)])

    def free_lease(self, state: RequestState) -> None:
        """Frees the leased blocks: they are no longer written."""
        self.stalled = False
        self._awaited_kv.free_lease(state)

    # Steps.

    def schedule(self) -> ScheduledStep | None:
        """Decides the next step. None: nothing can run now."""
        self._pin_blocked = None
        self._wake(self._holdings.store_some())
        self._holdings.evict_ahead(self.queues.remote)
        draft = Draft(self._step + 1, self._settings.max_num_batched_tokens)
        self._grow_decodes(draft)
        draft.budget -= len(draft.decode_rows(self.batch))
        self._prefill(draft)
        scheduled = self._finalize(draft)
        self.stalled = scheduled is None and not draft.preempted
        return scheduled

    def commit(self, scheduled: ScheduledStep) -> None:
        """Makes the blocks that a computed step filled findable."""
        plan = scheduled.plan
        size = self._block_size
        computed = plan.num_computed_tokens + plan.num_scheduled_tokens
        if self.batch.max_step_tokens == 1:
            fills = computed % size < plan.num_scheduled_tokens  # the block ends after the step's first token
        else:
            fills = np.ones(len(computed), np.bool_)  # `computed` is an upper bound
        for index in fills.nonzero()[0].tolist():
            state = scheduled.states[index]
            if state.row == plan.rows.item(index):
                # A decode's only counted token is the one that was known before.
                self.store(state, min(int(computed[index]), len(state.token_ids)))

    def draw(self, scheduled: ScheduledStep) -> tuple[TokenMasks | None, Int32]:
        """Returns the masks of a launched step whose masks_follow, and the indices of constrained rows without one.

        Those rows get no token: their grammars are not ready, or their requests have ended.
        """
        plan, batch = scheduled.plan, self.batch
        constrained = np.array([state.grammar is not None for state in scheduled.states]) & plan.samples
        ready = np.array([state.row != NO_ROW and not state.mask_pending for state in scheduled.states])
        late = [index for index in np.flatnonzero(constrained & ~ready) if scheduled.states[index].row != NO_ROW]
        batch.num_computed[plan.rows[late]] -= 1
        drawn = constrained & ready
        batch.hold(plan.rows[drawn])
        self._follow_pace.drawn(int(np.count_nonzero(drawn)) + len(late), len(late))
        batch.follow(plan.rows[drawn], self._follow_pace.may_follow())
        masks = token_masks(scheduled, drawn) if drawn.any() else None
        return masks, np.flatnonzero((constrained & ~ready)[plan.samples]).astype(np.int32)

    def collected(self, step: int) -> None:
        """Records that the device no longer writes blocks of this step or earlier ones."""
        self.stalled = False
        self._holdings.collected(step)

    def store(self, state: RequestState, num_computed: int) -> None:
        """Makes the request's full blocks findable up to `num_computed` tokens, and wakes waiting requests."""
        if woken := self._holdings.store(state, num_computed):
            self._wake(woken)

    def skip_steps(self, count: int) -> int:
        """Counts steps that were not scheduled here. Returns the number of the last one."""
        self._step += count
        self._holdings.collected(self._step)
        return self._step

    def reset_prefix_cache(self, states: list[RequestState]) -> None:
        """Forgets every cached block. The blocks that these requests hold will never be found."""
        self.pool.reset()
        self.restores.reset()
        for state in states:
            if state.block_ids or state.leased:
                state.caching = False
        for state in states:
            self._wake(self._prefixes.end(state))

    def recompute_all(self) -> None:
        """Queues every request that has blocks again, to be recomputed.

        Call without steps in flight, open leases and restores in progress.
        """
        draft = Draft(self._step + 1, 0)
        for state in self.batch.running():
            self._preempt(state, draft)
        for state in list(self.queues.ready):
            self.queues.ready.discard(state)
            self._preempt(state, draft)

    def restore_ended(self, restore_id: int, landed: bool) -> int:
        """Ends a restore, whose copy is complete or has failed, and places the waiting requests. Returns its blocks."""
        num_blocks, woken = self._awaited_kv.end_restore(restore_id, landed)
        self.stalled = False
        self._wake(woken)
        return num_blocks

    # Placing.

    def _may_admit(self) -> bool:
        return self.queues.num_queued > 0 and not self.stalled

    def _num_reusable(self, state: RequestState) -> int:
        """Returns the blocks worth looking up.

        The last known token is computed even if all are cached: it yields the next.
        """
        if state.request.sampling.prompt_logprobs is not None:
            return 0
        return (len(state.token_ids) - 1) // self._block_size

    def _park(self, state: RequestState, num_hits: int) -> bool:
        common = self._prefixes.last_common(state, num_hits, self._num_reusable(state))
        if common is None:
            return False
        state.phase = Phase.PARKED
        self._prefixes.park(state, common)
        return True

    def _wake(self, woken: Iterable[RequestState]) -> None:
        for state in sorted(woken, key=lambda other: other.rank):
            self.place(state)

    def _pin(self, state: RequestState) -> None:
        self.stalled = False
        self._holdings.pin(state)

    def _count_admission(self, state: RequestState) -> None:
        self._counters.num_prompt_tokens += len(state.token_ids)
        self._counters.num_cached_tokens += state.num_cached_tokens

    # Decisions of a step.

    def _grow_decodes(self, draft: Draft) -> None:
        """Gives each decode that starts a new block one. Preempts if there is none."""
        batch = self.batch
        rows = draft.decode_rows(batch)
        for state in sorted(batch.states_at(batch.short_rows(rows)), key=lambda other: other.rank):
            while state.row != NO_ROW:
                block_ids = self.pool.allocate(1)
                if block_ids is not None:
                    self._extend(state, block_ids, draft)
                    break
                if batch.has_block(state.row):
                    break
                draft.preempted = True
                self._preempt(self._victim() or state, draft)

    def _extend(self, state: RequestState, block_ids: list[BlockId], draft: Draft) -> None:
        state.block_ids += block_ids
        self.batch.capacity[state.row] += len(block_ids) * self._block_size
        draft.new_blocks[Row(state.row)] = block_ids

    def _victim(self) -> RequestState | None:
        """Returns the request to preempt: among the least urgent, one of the tenant that holds most.

        A prefill for another worker is not preempted: its blocks are promised to a peer.
        """
        candidates = [state for state in self.batch.running() if not state.request.prefill_only]
        if not candidates:
            return None
        priority = max([state.rank[0] for state in candidates])
        last = [state for state in candidates if state.rank[0] == priority]
        num_held: Counter[str] = Counter()
        for state in last:
            num_held[state.request.tenant] += len(state.block_ids)
        return max(last, key=lambda state: (num_held[state.request.tenant], state.rank))

    def _preempt(self, state: RequestState, draft: Draft) -> None:
        if state.row != NO_ROW:
            draft.take_out(state, self.batch.remove(state))
        woken = self._holdings.free_early(state)
        state.caching = self._settings.prefix_caching
        state.phase = Phase.WAITING
        state.restored = False
        state.min_free = 0
        state.num_preemptions += 1
        self._counters.num_preemptions += 1
        self.queues.waiting.push(state)
        self._wake([*woken, *self._prefixes.end(state)])

    def _prefill(self, draft: Draft) -> None:
        """Continues and admits prompts. Admits none after a preemption."""
        if self._shares.wanted():
            admits = not draft.preempted and self._admit_ready_ones(draft) is not Admission.NO_ROOM
            self._shares.divide(draft, self._schedule_chunk, self._try_to_admit if admits else None)
            return
        for state in self.batch.prefilling:
            if draft.budget <= 0:
                return
            self._schedule_chunk(state, draft)
        if not draft.preempted and self._admit_ready_ones(draft) is Admission.DONE:
            self._admit_by_rank(draft)

    def _schedule_chunk(self, state: RequestState, draft: Draft) -> None:
        """Gives the request all tokens that are left, beside those that it has, or as many as it needs."""
        given = draft.chunks.get(state, 0)
        remaining = len(state.token_ids) - int(self.batch.num_computed[state.row]) - given
        more = min(remaining, draft.budget)
        if more > 0:
            draft.chunks[state] = given + more
            draft.budget -= more

    def _admit_ready_ones(self, draft: Draft) -> Admission:
        """Admits remotely prefilled requests, in order, while there is room."""
        while draft.budget > 0 and (state := self.queues.ready.peek()) is not None:
            if state.mask_pending:
                return Admission.NOT_YET
            if not self._admit_ready(state, draft):
                return Admission.NO_ROOM
        return Admission.DONE

    def _admit_by_rank(self, draft: Draft) -> None:
        while draft.budget > 0 and (state := self.queues.waiting.peek()) is not None:
            if self._try_to_admit(state, draft) is not Admission.DONE:
                return

    def _try_to_admit(self, state: RequestState, draft: Draft) -> Admission:
        # All tokens of a preempted request are known only when its last step is collected.
        if state.last_step > self._holdings.collected_step or state.mask_pending:
            return Admission.NOT_YET
        if self._admit_waiting(state, draft):
            return Admission.DONE
        return Admission.HELD if self._pin_blocked == state.rank else Admission.NO_ROOM

    def _admit_ready(self, state: RequestState, draft: Draft) -> bool:
        """Admits a remotely prefilled request.

        An accepted first token may need one more block. False: there is no room.
        """
        num_fresh = num_blocks_for(len(state.token_ids), self._block_size) - len(state.block_ids)
        if not self._make_room(state, num_fresh, draft):
            return False
        state.block_ids += self._holdings.allocate(num_fresh)
        self._start(state, min(state.num_remote_tokens, len(state.token_ids) - 1), draft)
        return True

    def _admit_waiting(self, state: RequestState, draft: Draft) -> bool:
        """Admits or parks a request. False: there is no room."""
        if len(self.batch) and self.pool.num_free < state.min_free and not self._outranks_someone(state):
            return False
        hits = self.pool.lookup(state.block_hashes[: self._num_reusable(state)])
        if self._park(state, len(hits)):
            self.queues.waiting.discard(state)
            return True
        num_fresh = num_blocks_for(len(state.token_ids), self._block_size) - len(hits)
        if not self._leave_room(state, len(hits) + num_fresh):
            self._pin_blocked = state.rank
            return False
        state.min_free = num_fresh + self.pool.count_unheld(hits)
        self.pool.touch(hits)
        if not self._make_room(state, num_fresh, draft):
            self.pool.free(hits)
            return False
        slots = self.restores.find(state, len(hits), self._num_reusable(state))
        if slots:
            self.queues.waiting.discard(state)
            self._awaited_kv.begin_restore(state, hits, slots)
            return True
        state.block_ids = hits + self._holdings.allocate(num_fresh)
        state.num_stored_blocks = len(hits)
        if state.started is None and not state.num_remote_tokens:
            state.num_cached_tokens = len(hits) * self._block_size
            self._count_admission(state)
        self._prefixes.begin(state, len(hits), len(state.block_hashes))
        self._start(state, len(hits) * self._block_size, draft)
        return True

    def _leave_room(self, state: RequestState, num_blocks: int) -> bool:
        """Whether pins leave room for the request, and its own pins for all running ones."""
        if state.request.prefill_only:
            return self._holdings.pins.would_leave_room(state, num_blocks, self.queues.must_fit())
        return self._holdings.pins.leave_room_for(state)

    def _outranks_someone(self, state: RequestState) -> bool:
        victim = self._victim()
        return victim is not None and victim.rank[0] > state.rank[0]

    def _make_room(self, state: RequestState, num_blocks: int, draft: Draft) -> bool:
        """Provides a row and blocks, at the cost of less urgent running requests only."""
        while True:
            watermark = self._watermark if num_blocks and len(self.batch) else 0
            if self.batch.num_free_rows and self.pool.num_free >= num_blocks + watermark:
                return True
            victim = self._victim()
            if victim is None or victim.rank[0] <= state.rank[0]:
                return False
            self._preempt(victim, draft)

    def _start(self, state: RequestState, num_computed: int, draft: Draft) -> None:
        """Gives the request a row and its first chunk."""
        self.queues.waiting.discard(state)
        self.queues.ready.discard(state)
        state.phase = Phase.RUNNING
        first_time = state.started is None
        if first_time:
            state.started = self._clock()
        row = self.batch.add(state, num_computed, len(state.block_ids) * self._block_size)
        request = state.request
        draft.admitted[row] = RowInit(row, request.token_ids.array(), request.num_prompt_tokens, request.sampling)
        draft.new_blocks[row] = list(state.block_ids)
        if request.prefill_only:
            draft.started[state] = PrefillStarted(request, num_computed, list(state.block_ids), row, draft.step)
        self._pin(state)
        self._schedule_chunk(state, draft)

    def _finalize(self, draft: Draft) -> ScheduledStep | None:
        scheduled = draft.finalize(self.batch)
        if scheduled is not None:
            self._step = draft.step
            self._mask(scheduled)
        return scheduled

    def _mask(self, scheduled: ScheduledStep) -> None:
        """Adds the masks of constrained rows. Holds the rows until their grammars have the sampled tokens."""
        if not self.batch.num_constrained:
            return
        plan = scheduled.plan
        constrained = self.batch.constrained[plan.rows] & plan.samples
        if not constrained.any():
            return
        rows = plan.rows[constrained]
        plan.masks_follow = self.batch.follows(rows)
        if not plan.masks_follow:
            plan.masks = token_masks(scheduled, constrained)
        self.batch.hold(rows)
        self.batch.follow(rows, not plan.masks_follow and self._follow_pace.may_follow())


def _num_ahead(num_blocks: int, num_host_slots: int, budget: int, block_size: int) -> int:
    """Returns how many blocks should be evictable without loss: several steps' worth, or one long prompt's."""
    several_steps = 2 * num_blocks_for(budget, block_size)
    return min(max(several_steps, num_blocks // 8), num_blocks, max(1, num_host_slots // 4))
