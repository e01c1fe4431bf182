"""The engine: accepts requests, runs steps, returns tokens. Knows no wire format and no tensors.

Single-threaded: the engine thread calls every method. A step may be launched while earlier steps are in flight
(executor.depth). If one of those turns out to end a request, the later steps' work for it is discarded.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from baton.rpc.errors import InvalidRequest, ServiceError
from baton.worker.core import BlockHash, BlockId, FinishReason, Request, Tier, TokenLogprobs
from baton.worker.engine.adapter_requests import AdapterRequests
from baton.worker.engine.constraints import Constraints
from baton.worker.engine.host_copies import HostCopier
from baton.worker.engine.live_requests import LiveRequests
from baton.worker.engine.load import load_snapshot
from baton.worker.engine.queue_limit import check_queue
from baton.worker.engine.step_limits import StepLimits
from baton.worker.engine.steps_in_flight import StepsInFlight
from baton.worker.executors.base import Executor
from baton.worker.kv.block_origins import BlockOrigin
from baton.worker.kv.block_pool import PoolAudit
from baton.worker.kv.cache_events import RemovedEvent, StoredEvent
from baton.worker.kv.disk_tier.tier import DiskTier
from baton.worker.kv.partial_groups import spans_of
from baton.worker.kv.residency import ResidencyTimes
from baton.worker.link.step_status import StepStatus
from baton.worker.requests.outputs import EngineCounters, EngineListener, LoadSnapshot, StepOutputs
from baton.worker.requests.state import GroupSpan, Phase, RequestState
from baton.worker.requests.validation import check_head, check_request
from baton.worker.sampling.grammar.stats import GrammarStats
from baton.worker.scheduling.rates import Rates
from baton.worker.scheduling.scheduler import Scheduler
from baton.worker.scheduling.settings import EngineSettings
from baton.worker.scheduling.steps.draft import ScheduledStep

if TYPE_CHECKING:
    from baton.worker.engine.adapters.pool import AdapterPool
    from baton.worker.sampling.grammar.grammars import Grammars

_BEGUN_AHEAD_SECONDS = 3600.0  # resumed requests are ranked this much earlier than their arrival


class Engine:
    """Connects scheduler, block pool and executor."""

    def __init__(
        self,
        executor: Executor,
        settings: EngineSettings,
        epoch: int,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
        step_status: StepStatus | None = None,  # receives each step's time limit; None: no watchdog
        adapters: AdapterPool[RequestState] | None = None,  # None: no request has an adapter
        disk: DiskTier | None = None,  # below host memory, which the executor has then
    ) -> None:
        settings.validate()
        self.epoch = epoch  # of the cache; new after every reset_prefix_cache
        model = executor.model
        capacity = executor.kv_spec.most_tokens(executor.num_blocks, settings.max_num_batched_tokens)
        self.max_model_len = min(model.max_model_len, capacity) if model.cached else model.max_model_len
        self.frozen = False  # no step is scheduled; steps in flight end
        self.waits = False  # the device has as many steps as it may, and none has ended
        self._listeners: list[EngineListener] = []
        self._executor = executor
        self._settings = settings
        self._clock = clock
        self._counters = EngineCounters()
        self._rates = Rates()
        self._caches = settings.prefix_caching and model.cached
        host = executor.host if self._caches else None
        self._scheduler = Scheduler(
            executor.num_blocks,
            executor.kv_spec.block_size,
            self.max_model_len,
            settings,
            self._counters,
            clock,
            0 if host is None else host.num_slots,
            self._rates,
            executor.max_step_tokens,
            executor.max_masked_tokens,
            whole_prompts=not model.cached,
            kv_spec=executor.kv_spec if model.cached else None,
            disk=None if host is None else disk,
        )
        self._copier = HostCopier(host, self._scheduler, self._counters, executor.kv_spec.page_bytes)
        self._requests = LiveRequests(self._scheduler, self._counters, clock, grammars)
        self._states = self._requests.states
        self._num_submitted = 0
        self.limits = StepLimits(settings.stall_seconds if step_status is not None else 0.0)
        self._in_flight = StepsInFlight(
            executor,
            self._scheduler,
            self._requests,
            self._counters,
            self._rates,
            clock,
            grammars,
            self.limits,
            step_status or StepStatus(),
        )
        self._constraints = Constraints(grammars, self._scheduler, self._requests, self._in_flight, self._rates)
        self._adapters = AdapterRequests(adapters, self._scheduler, self._requests, self._place, clock)

    def listen(self, listener: EngineListener) -> None:
        """Adds a listener. Listeners are called in the order in which they were added."""
        self._listeners.append(listener)

    def submit(self, request: Request, receiver_block_size: int = 0) -> None:
        """Accepts a request. Raises InvalidRequest if it can never run, NoCapacity if the queue is full.

        `receiver_block_size`: of the worker that gets the KV of a prefill_only request; 0: none does.
        """
        block_size, model = self._executor.kv_spec.block_size, self._executor.model
        check_head(request, model)
        prompt = request.token_ids.array(request.num_prompt_tokens)
        self._executor.processors.check(request.sampling.extra_args, prompt)
        check_request(
            request,
            model.vocab_size,
            self.max_model_len,
            self._executor.num_blocks,
            block_size,
        )
        if request.request_id in self._states:
            raise InvalidRequest(f"request {request.request_id!r} exists already", field="request_id")
        if request.constraint is not None:
            self._constraints.check()
        self._adapters.check(request)
        check_queue(request.tenant, self._scheduler, self._settings.max_queue_depth, self.load)
        state = self._new_state(request)
        state.receiver_block_size = receiver_block_size
        self._scheduler.check_fits(state)
        if not self._requests.add(state):
            return
        if self._caches:
            if request.block_hashes:
                state.take_hashes(request.block_hashes, block_size)
            state.hash_up_to(len(request.token_ids), block_size)
        if request.adapter is None:
            self._place(state)
        else:
            self._adapters.open(state)

    def abort(self, request_id: str) -> None:
        """Ends a request: its Finish is in the next outputs; leased blocks stay until free_lease. Idempotent."""
        state = self._requests.live(request_id)
        if state is not None:
            self._requests.finish(state, FinishReason.ABORT)

    def step(self, wait: bool = True) -> StepOutputs:
        """Schedules, launches, collects and updates once. Returns at once, empty, if nothing can run.

        Without `wait`, a step that has not ended is not collected: `waits` is then True, and executor.watch reports its
        end.
        """
        self._requests.expire()
        self._copier.land()
        self._adapters.settle()
        self._constraints.settle()
        self._in_flight.draw()
        scheduled = None if self.frozen or self._in_flight.full else self._scheduler.schedule()
        self._copier.start()
        if scheduled is not None:
            self._report_scheduled(scheduled)
            began = self._in_flight.launch(scheduled)
            for listener in self._listeners:
                listener.on_launched(began)
        elif not self._in_flight and self._copier.busy:
            self._copier.wait()
        if self._scheduler.pool.has_evicted:
            for listener in self._listeners:
                listener.on_evicted()
        self.waits = self._constraints.only_compiling and not (self._working or self._scheduler.runnable())
        if self._in_flight and (scheduled is None or self._in_flight.full):
            if wait or self._in_flight.ended:
                self._in_flight.collect()
                self._adapters.settle()
            else:
                self.waits = True
        return self._requests.take_outputs()

    def take_outputs(self) -> StepOutputs:
        """Returns the outputs since the last call, without a step."""
        return self._requests.take_outputs()

    def is_running(self, request_id: str) -> bool:
        """Returns whether the request has a row: a step that computes it is launched."""
        state = self._states.get(request_id)
        return state is not None and state.phase is Phase.RUNNING

    def has_work(self) -> bool:
        """Returns whether step() would do anything now. Requests that only wait for a remote prefill do not count."""
        runnable = not self.frozen and self._scheduler.runnable()
        return self._working or self._constraints.pending or self._adapters.pending or runnable

    @property
    def _working(self) -> bool:
        """Whether a step or a copy is in flight, or outputs wait."""
        outputs = self._requests.outputs or self._scheduler.prefill_wanted
        return bool(self._in_flight or outputs or self._copier.busy)

    @property
    def wants_prefills(self) -> bool:
        """Whether the next step's outputs list remote prefills, which need not wait for its end."""
        return bool(self._scheduler.prefill_wanted)

    @property
    def settled(self) -> bool:
        """Whether the device is idle: no step is in flight, and no block is being restored from host memory."""
        return not self._in_flight and not self._copier.busy

    def recompute_all(self) -> None:
        """Takes every request's blocks, to be computed again once the engine is not frozen. Only while settled."""
        self._scheduler.recompute_all()

    def next_deadline(self) -> float | None:
        """Returns when step() must be called for a request's deadline or adapter, on the engine's clock."""
        dues = (self._requests.next_deadline(), self._adapters.due)
        return min((due for due in dues if due is not None), default=None)

    def unwatch_steps(self) -> None:
        """Lifts the time limit of steps in flight: the engine is about to do other work meanwhile."""
        self._in_flight.unwatch()

    def load(self) -> LoadSnapshot:
        """Returns the current load and speed."""
        left = self._in_flight.num_prefill_tokens_left
        load = load_snapshot(self._scheduler, self._settings, self._rates, self._copier.restore_bytes_per_second, left)
        pool = self._adapters.pool
        if pool is None:
            return load
        return load._replace(
            adapter_load_seconds=pool.load_seconds,
            num_adapter_slots=pool.num_slots,
            num_resident_adapters=len(pool.resident()),
        )

    def residency_times(self) -> ResidencyTimes:
        """Returns how long measured blocks live and are unused."""
        return self._scheduler.residency_times

    @property
    def num_deferred(self) -> int:
        """Queued requests that wait for KV, a prefix or a grammar instead of capacity."""
        return self._scheduler.num_deferred

    def grammar_stats(self) -> GrammarStats:
        """Returns the cost of constraints."""
        return self._constraints.stats()

    def counters(self) -> EngineCounters:
        """Returns a copy of the totals."""
        return dataclasses.replace(
            self._counters,
            step_tokens=self._counters.step_tokens.copy(),
            accepted_by_place=list(self._counters.accepted_by_place),
            offload_bytes=self._counters.offload_bytes.copy(),
            restore_bytes=self._counters.restore_bytes.copy(),
            num_evicted_blocks=self._scheduler.pool.num_evicted,
            num_dropped_blocks=self._scheduler.offloads.num_dropped,
        )

    def audit(self) -> PoolAudit:
        """Checks the pool and host memory. Raises DataLoss if they contradict themselves or the requests."""
        self._scheduler.check_integrity(list(self._states.values()))
        return self._scheduler.pool.audit()

    def count_blocks(self) -> PoolAudit:
        """Returns the pool's own counts, unchecked. O(1)."""
        return self._scheduler.pool.count()

    def adapters_on_device(self) -> list[str]:
        """Returns the names of the adapters on the device."""
        pool = self._adapters.pool
        return [] if pool is None else pool.on_device()

    def take_events(self) -> list[StoredEvent | RemovedEvent]:
        """Returns the cache's changes since the last call, in order within each tier."""
        return [*self._scheduler.pool.take_events(), *self._scheduler.offloads.tier.take_events()]

    def take_origins(self) -> Mapping[BlockHash, BlockOrigin]:
        """Returns the origins of blocks stored since the last call. Empty without the setting block_origins."""
        origins = self._scheduler.origins
        return {} if origins is None else origins.take()

    def cached_hashes(self, tier: Tier = Tier.DEVICE) -> bytes:
        """Returns everything findable, 16 bytes a block. Call take_events first for a consistent snapshot."""
        return b"".join(self.cached_by_groups(tier).values())

    def cached_by_groups(self, tier: Tier) -> Mapping[tuple[int, ...], bytes]:
        """Returns the same by the groups of the cache that hold it; (): all groups."""
        books = self._scheduler.pool if tier is Tier.DEVICE else self._scheduler.offloads.tier
        return books.cached_by_groups()

    def reset_prefix_cache(self) -> int:
        """Forgets every cached block and pending event. Returns the new epoch. Running requests keep their blocks."""
        self._scheduler.reset_prefix_cache(list(self._states.values()))
        self.epoch += 1
        return self.epoch

    # For the decode side of a hand-over. The request was listed in StepOutputs.prefill_wanted.

    def reserve_blocks(self, request_id: str) -> list[BlockId] | None:
        """Leases the rest of the prompt's blocks. None: too few are free; try again after a step."""
        state = self._states.get(request_id)
        if state is None or state.phase is not Phase.REMOTE:
            return None
        return self._scheduler.reserve(state)

    def leased_spans(self, request_id: str) -> list[GroupSpan]:
        """Returns a request's leased blocks in each group."""
        return self._scheduler.leased_spans(self._states[request_id])

    def accept_first_token(self, request_id: str, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Accepts the prefill worker's token, unless the request has ended or continued without it."""
        state = self._requests.live(request_id)
        if state is None or state.phase not in (Phase.REMOTE, Phase.READY):
            return
        if len(state.token_ids) > state.num_remote_tokens:
            return
        state.first_token = self._clock()
        self._requests.append_token(state, token_id, logprobs)

    def finish_transfer(self, request_id: str) -> None:
        """Ends the lease: the blocks are valid and cached, and the request runs.

        Without a first token, the engine computes the prompt's last token itself. The blocks of an ended request stay
        cached.
        """
        state = self._states.get(request_id)
        if state is None or not state.leased:
            return
        self._scheduler.finish_transfer(state)
        self._requests.forget_if_done(state)

    def prefill_locally(self, request_id: str) -> None:
        """Abandons the remote prefill after the fence: frees leased blocks, and queues the request here."""
        state = self._states.get(request_id)
        if state is None:
            return
        if state.phase is Phase.REMOTE:
            self._counters.num_local_fallbacks += 1
            self._scheduler.prefill_locally(state)
        else:
            self.free_lease(request_id)

    def fail_remote(self, request_id: str, error: ServiceError) -> None:
        """Ends a request whose remote prefill has failed, and frees leased blocks, after the fence."""
        state = self._states.get(request_id)
        if state is not None and state.phase is Phase.REMOTE:
            self._requests.fail(state, error)
        self.free_lease(request_id)

    def free_lease(self, request_id: str) -> None:
        """Frees the leased blocks of a request that has ended, after the fence. Idempotent."""
        state = self._states.get(request_id)
        if state is not None and state.phase is Phase.DONE:
            self._scheduler.free_lease(state)
            self._requests.forget_if_done(state)

    # For the prefill side of a hand-over.

    def free_prefill(self, request_id: str) -> None:
        """Frees a computed prefill_only request's blocks. Idempotent."""
        state = self._states.get(request_id)
        if state is not None and state.phase is Phase.HOLDING:
            self._counters.num_finished += 1
            self._requests.retire(state)

    def block_ids(self, request_id: str) -> list[BlockId]:
        """Returns a copy of the request's block table, with leased blocks. Empty for an unknown request."""
        state = self._states.get(request_id)
        return [] if state is None else [*state.block_ids, *state.leased]

    # Submitting.

    def _place(self, state: RequestState) -> None:
        """Places a request that has what it needs on the device, once its grammar is compiled."""
        if state.request.constraint is None:
            self._scheduler.place(state)
        else:
            self._constraints.compile(state)

    def _new_state(self, request: Request) -> RequestState:
        self._num_submitted += 1
        stop = request.stop
        longest = request.num_prompt_tokens + stop.max_tokens
        ends_with_prompt = request.prefill_only or request.pooling is not None
        limit = len(request.token_ids) + 1 if ends_with_prompt else min(longest, self.max_model_len)
        # Requests that have produced tokens are ranked before those that have not begun.
        begun = not request.prefill_only and len(request.token_ids) > request.num_prompt_tokens
        arrival = request.arrival - _BEGUN_AHEAD_SECONDS if begun else request.arrival
        return RequestState(
            request=request,
            rank=(request.priority, arrival, self._num_submitted),
            limit=limit,
            stop_token_ids=stop.eos_token_ids | stop.stop_token_ids,
            submitted=self._clock(),
            wants_remote=request.remote_prefill and not request.prefill_only,
            caching=self._caches,
            num_cacheable_tokens=sys.maxsize if self._settings.cache_outputs else request.num_prompt_tokens,
        )

    def _report_scheduled(self, scheduled: ScheduledStep) -> None:
        self._requests.outputs.prefill_started += scheduled.started
        admitted = scheduled.admitted_requests() if scheduled.plan.admitted else []
        moves = bool(scheduled.plan.more_blocks)
        moved = [state for state in scheduled.states if state.request.prefill_only] if moves else []
        for listener in self._listeners:
            for started in scheduled.started:
                listener.on_prefill_started(started)
            if admitted:
                listener.on_admitted(admitted)
            for state in moved:
                listener.on_windows_moved(state.request, spans_of(state.partial))
