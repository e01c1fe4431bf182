"""Decides what runs in the next step, and with which blocks. Owns every request's place; knows no device.

Running requests come first: a decode without a block preempts another request. Then prompts are continued and admitted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from baton.rpc.errors import InvalidRequest, Unsupported
from baton.worker.core import BlockId, Int32, TokenMasks
from baton.worker.kv.block_origins import BlockOrigins
from baton.worker.kv.disk_tier.tier import DiskTier, Ended
from baton.worker.kv.holdings import Holdings
from baton.worker.kv.partial_groups import PartialGroups
from baton.worker.kv.residency import ResidencyMeter, ResidencyTimes
from baton.worker.kv_spec import KvSpec
from baton.worker.requests.outputs import EngineCounters, PrefillWanted
from baton.worker.requests.state import NO_ROW, GroupSpan, Phase, RequestState, num_blocks_for
from baton.worker.scheduling.admission import Admissions
from baton.worker.scheduling.awaited_kv import AwaitedKv
from baton.worker.scheduling.background import Background
from baton.worker.scheduling.disk_blocks import DiskBlocks
from baton.worker.scheduling.growth import Growth
from baton.worker.scheduling.partial_prefills import PartialPrefills
from baton.worker.scheduling.placement import Placement
from baton.worker.scheduling.preemption import Preemption
from baton.worker.scheduling.queues import RequestQueues
from baton.worker.scheduling.rates import Rates
from baton.worker.scheduling.restores import RestoreCost, Restores
from baton.worker.scheduling.settings import EngineSettings
from baton.worker.scheduling.steps.draft import Draft, ScheduledStep
from baton.worker.scheduling.steps.masks import StepMasks
from baton.worker.scheduling.tenants.shared_steps import SharedSteps
from baton.worker.scheduling.whole_prompts import Prompts, WholePrompts


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
        max_masked_tokens: int = 1,  # of one decode under a mask
        *,
        whole_prompts: bool = False,  # nothing is cached: a step computes prompts from their first to their last token
        kv_spec: KvSpec | None = None,  # None: one full group
        disk: DiskTier | None = None,  # below host memory
    ) -> None:
        num_ahead = _num_ahead(num_blocks, num_host_slots, settings.max_num_batched_tokens, block_size)
        sample = settings.residency_sample
        self.origins = BlockOrigins(block_size) if settings.block_origins else None
        self.residency = ResidencyMeter(sample, clock) if sample else None
        holdings = self._holdings = Holdings(
            num_blocks,
            block_size,
            max_model_len,
            num_host_slots,
            num_ahead,
            self.residency,
            self.origins,
            settings.min_host_uses,
            PartialGroups(kv_spec, block_size, settings.max_num_batched_tokens, settings.state_snapshot_blocks),
            settings.state_cache_share,
            settings.host_eviction_policy,
        )
        if holdings.partial.has_states:
            _check_states(settings, num_host_slots, holdings.partial.largest_state)
        self.offloads = holdings.offloads
        self.pool = holdings.pool
        cost = RestoreCost(rates or Rates(), settings.min_host_hit_tokens)
        self.restores = Restores(self.offloads.tier, cost, block_size)
        self.disk: DiskBlocks | None = None
        if disk is not None:
            cost = RestoreCost(self.restores.cost.rates, settings.min_host_hit_tokens)
            self.disk = DiskBlocks(disk, holdings, cost, clock)
        # A decode writes one state, of the block of its tokens.
        span = block_size if holdings.partial.has_states else 0
        queues = self.queues = RequestQueues(settings.max_num_requests, max_step_tokens, max_masked_tokens, span)
        self.batch = self.queues.batch
        self._prefixes = holdings.prefixes
        self._masks = StepMasks(self.batch)
        self._shared_steps = SharedSteps(queues, settings.max_shared_prefill_tokens, clock)
        self._background = Background(queues, settings.max_background_prefill_tokens, settings.max_num_requests, clock)
        self._awaited_kv = AwaitedKv(holdings, queues, self.restores, settings, counters, clock)
        self._placement = Placement(holdings, queues, self._awaited_kv, self.disk)
        self._preemption = Preemption(holdings, queues, self._placement, counters, settings.prefix_caching)
        self._growth = Growth(holdings, self.batch, self._preemption)
        self._prompts: Prompts
        if whole_prompts:
            self._prompts = WholePrompts(queues, self._background, counters, clock)
        else:
            self._prompts = Admissions(
                holdings,
                queues,
                self._awaited_kv,
                self._placement,
                self._preemption,
                PartialPrefills(queues, settings, max_model_len),
                self._background,
                counters,
                clock,
                settings.dummy_kv,
            )
        self._block_size = block_size
        self._settings = settings
        self._step = 0

    # For the engine.

    @property
    def has_states(self) -> bool:
        """Whether some layers keep states, which are snapshotted at the ends of steps."""
        return self._holdings.partial.has_states

    @property
    def num_queued(self) -> int:
        """Requests without a row that need one."""
        loading = 0 if self.disk is None else len(self.disk.states)
        return self.queues.num_waiting + len(self.restores.states) + loading + self._prefixes.num_parked

    @property
    def last_step(self) -> int:
        """The number of the last scheduled step."""
        return self._step

    @property
    def collected_step(self) -> int:
        """The number of the last collected step."""
        return self._holdings.collected_step

    @property
    def num_deferred(self) -> int:
        """Requests of num_queued that wait for KV, a prefix, an adapter or a grammar instead of capacity."""
        return self.num_queued - self.queues.num_queued

    @property
    def residency_times(self) -> ResidencyTimes:
        """How long measured blocks live and are unused."""
        return ResidencyTimes() if self.residency is None else self.residency.times

    @property
    def prefill_wanted(self) -> list[PrefillWanted]:
        """Remote prefills that were begun since take_prefill_wanted."""
        return self._placement.prefill_wanted

    def take_prefill_wanted(self) -> list[PrefillWanted]:
        """Returns the remote prefills begun since the last call."""
        wanted, self._placement.prefill_wanted = self._placement.prefill_wanted, []
        return wanted

    @property
    def storing(self) -> bool:
        """Whether steps make received blocks findable."""
        return self._holdings.storing

    def runnable(self) -> bool:
        """Whether schedule may find something."""
        return len(self.batch) > 0 or self.queues.may_admit() or self.storing

    def can_go_on(self) -> bool:
        """Whether schedule may find something besides requests that wait for their masks."""
        return len(self.batch) > self.batch.num_held or self.queues.may_admit()

    def queued(self) -> list[RequestState]:
        """Returns the requests of num_queued."""
        loading = () if self.disk is None else self.disk.states
        return [*self.queues.list_waiting(), *self.restores.states, *loading, *self._prefixes.parked]

    def check_integrity(self, states: list[RequestState]) -> None:
        """Raises DataLoss unless exactly these requests hold and lease the pool's blocks."""
        self._holdings.check_integrity(states, self.restores.holds)
        self.restores.audit(() if self.disk is None else self.disk.written_slots)

    # Adding and removing requests.

    def load_first(self, state: RequestState) -> None:
        """Holds a new request until `place`, while its adapter is loaded."""
        state.phase = Phase.LOADING
        self.queues.compiling.add(state)

    def compile_first(self, state: RequestState) -> None:
        """Holds a new request until `place`, while its grammar is compiled."""
        state.phase = Phase.COMPILING
        self.queues.compiling.add(state)

    def place(self, state: RequestState) -> None:
        """Places a new or woken request: it begins a remote prefill, waits for a prefix, or is queued."""
        self._shared_steps.see(state)
        self._background.see(state)
        self._placement.place(state)

    def retire(self, state: RequestState) -> None:
        """Removes a request that has ended. Its lease, if any, stays until free_lease."""
        self._shared_steps.see(state)
        self._background.see(state)
        if state.phase is Phase.PARKED:
            self._prefixes.unpark(state)
        elif state.phase is Phase.RESTORING:
            self.restores.leave(state)
            if self.disk is not None:
                self.disk.leave(state)
        if state.row == NO_ROW:
            self.queues.dequeue(state)
        else:
            self.batch.remove(state)
        state.phase = Phase.DONE
        woken = self._holdings.free(state, self._step)
        self.queues.stalled = False
        self._holdings.pin(state)
        self._placement.wake([*woken, *self._prefixes.end(state)])

    def hold(self, state: RequestState) -> None:
        """Frees the row of a computed prefill_only request; its blocks stay until it retires."""
        self.batch.remove(state)
        state.phase = Phase.HOLDING
        self.queues.stalled = False
        self._placement.wake(self._prefixes.end(state))

    def release(self, state: RequestState) -> None:
        """Records that the tokens that may follow the request's last one are known."""
        self.queues.stalled = False
        if state.row != NO_ROW:
            self.batch.release(state.row)

    # Remote prefills.

    def check_fits(self, state: RequestState) -> None:
        """Raises InvalidRequest for a request that needs more blocks than there are, because of its receiver's size."""
        if not state.receiver_block_size:
            return
        needed, num_blocks = self._holdings.pinned.lifetime_blocks(state), self.pool.num_blocks
        if needed > num_blocks:
            raise InvalidRequest(
                f"the prompt has {len(state.token_ids)} tokens; its KV, with what a worker with blocks of "
                f"{state.receiver_block_size} gets, takes {needed} blocks, this worker has {num_blocks}",
                field="prompt_token_ids",
            )

    def leased_spans(self, state: RequestState) -> list[GroupSpan]:
        """Returns the leased blocks in each group."""
        return self._holdings.partial.leased_spans(state)

    def reserve(self, state: RequestState) -> list[BlockId] | None:
        """Leases the rest of a remote prefill's blocks, if every running request can still finish."""
        if not state.leased and not self._prompts.may_lease(state):
            return None
        leased = self._awaited_kv.reserve(state)
        if leased is not None:
            self.queues.stalled = False
        return leased

    def finish_transfer(self, state: RequestState) -> None:
        """Turns leased blocks into valid ones. Those of a request that has ended stay in the cache."""
        self.queues.stalled = False
        self._awaited_kv.finish_remote(state)

    def prefill_locally(self, state: RequestState) -> None:
        """Abandons a remote prefill."""
        self.free_lease(state)
        self.queues.remote.pop(state, None)
        woken = self._holdings.free(state, self._step)
        state.phase = Phase.WAITING
        state.started = None
        state.caching = self._settings.prefix_caching
        self.queues.stalled = False
        self._holdings.pin(state)
        self.queues.waiting.push(state)
        self._placement.wake([*woken, *self._prefixes.end(state)])

    def free_lease(self, state: RequestState) -> None:
        """Frees the leased blocks: they are no longer written."""
        self.queues.stalled = False
        self._awaited_kv.free_lease(state)

    # Steps.

    def schedule(self) -> ScheduledStep | None:
        """Decides the next step. None: nothing can run now."""
        self._prompts.begin_step()
        self._placement.wake(self._holdings.store_some())
        self._holdings.evict_ahead(self.queues.remote)
        draft = Draft(self._step + 1, self._settings.max_num_batched_tokens)
        self._growth.grow(draft)
        draft.budget -= len(draft.decode_rows(self.batch))
        kept = draft.budget - self._shared_steps.budget(draft.budget)
        draft.budget -= kept
        self._prompts.prefill(draft)
        draft.budget += kept
        scheduled = self._finalize(draft)
        self.queues.stalled = scheduled is None and not draft.preempted
        return scheduled

    def commit(self, scheduled: ScheduledStep) -> None:
        """Makes the blocks that a computed step filled findable."""
        plan = scheduled.plan
        size = self._block_size
        computed = plan.num_computed_tokens + plan.num_scheduled_tokens
        if self.batch.max_step_tokens == 1:
            fills = computed % size < plan.num_scheduled_tokens  # the block ends after the step's first token
        else:
            # `computed` is an upper bound, and a decode's only counted token is the one that was known before.
            computed = np.minimum(computed, [len(state.token_ids) for state in scheduled.states])
            fills = np.ones(len(computed), np.bool_)
        filled = fills.nonzero()[0]
        if not len(filled):
            return
        columns = zip(filled.tolist(), plan.rows[filled].tolist(), computed[filled].tolist(), strict=True)
        stored = [(state, end) for index, row, end in columns if (state := scheduled.states[index]).row == row]
        if woken := self._holdings.store_each(stored):
            self._placement.wake(woken)

    def draw(self, scheduled: ScheduledStep) -> tuple[TokenMasks | None, Int32]:
        """Returns the masks of a launched step whose masks_follow, and the indices of constrained rows without one.

        Those rows get no token: their grammars are not ready, or their requests have ended.
        """
        return self._masks.draw(scheduled)

    def collected(self, step: int) -> None:
        """Records that the device no longer writes blocks of this step or earlier ones."""
        self.queues.stalled = False
        self._holdings.collected(step)

    def store(self, state: RequestState, num_computed: int) -> None:
        """Makes the request's full blocks findable up to `num_computed` tokens, and wakes waiting requests."""
        if woken := self._holdings.store(state, num_computed):
            self._placement.wake(woken)

    def skip_steps(self, count: int) -> int:
        """Counts steps that were not scheduled here. Returns the number of the last one."""
        self._step += count
        self._holdings.collected(self._step)
        return self._step

    def reset_prefix_cache(self, states: list[RequestState]) -> None:
        """Forgets every cached block. The blocks that these requests hold will never be found."""
        self.pool.reset()
        self.restores.reset()
        if self.disk is not None:
            self.disk.reset()
        for state in states:
            if state.block_ids or state.leased:
                state.caching = False
        for state in states:
            self._placement.wake(self._prefixes.end(state))

    def recompute_all(self) -> None:
        """Queues every request that has blocks again, to be recomputed.

        Call without steps in flight, open leases and restores in progress.
        """
        draft = Draft(self._step + 1, 0)
        for state in self.batch.running():
            self._preemption.preempt(state, draft)
        for state in list(self.queues.ready):
            self.queues.ready.discard(state)
            self._preemption.preempt(state, draft)

    def restore_ended(self, restore_id: int, landed: bool) -> int:
        """Ends a restore, whose copy is complete or has failed, and places the waiting requests. Returns its blocks."""
        num_blocks, woken = self._awaited_kv.end_restore(restore_id, landed)
        self.queues.stalled = False
        self._placement.wake(woken)
        return num_blocks

    def disk_ended(self, ended: Ended) -> None:
        """Ends the write or the read of a block on disk, and places the waiting requests."""
        assert self.disk is not None
        woken = self.disk.ended(ended)
        self.queues.stalled = False
        self._placement.wake(woken)

    def _finalize(self, draft: Draft) -> ScheduledStep | None:
        if self._holdings.partial.has_states:
            self._cut_chunks(draft)
        scheduled = draft.finalize(self.batch, self._block_size)
        if scheduled is not None:
            self._step = draft.step
            self._masks.add(scheduled)
        return scheduled

    def _cut_chunks(self, draft: Draft) -> None:
        """Ends chunks earlier where requests of this step, which were placed after them, want to continue."""
        for state, chunk in draft.chunks.items():
            start = int(self.batch.num_computed[state.row])
            draft.chunks[state] = self._holdings.partial.chunk_end(state, start, start + chunk) - start


def _check_states(settings: EngineSettings, num_host_slots: int, num_pages: int) -> None:
    """Raises InvalidRequest or Unsupported for what cannot be with states, of which the largest has so many pages."""
    if 0 < num_host_slots < num_pages:
        raise InvalidRequest(
            f"host memory has {num_host_slots} blocks, and a state of the model takes {num_pages}: raise it, or leave "
            "it out",
            field="host_cache_gb",
        )
    if settings.dummy_kv:
        raise Unsupported("models with states compute every prompt: dummy_kv must be false", field="dummy_kv")


def _num_ahead(num_blocks: int, num_host_slots: int, budget: int, block_size: int) -> int:
    """Returns how many blocks should be evictable without loss: several steps' worth, or one long prompt's."""
    several_steps = 2 * num_blocks_for(budget, block_size)
    return min(max(several_steps, num_blocks // 8), num_blocks, max(1, num_host_slots // 4))
