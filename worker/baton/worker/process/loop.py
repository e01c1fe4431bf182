"""The loop of the engine process: reads frames, runs a step, sends frames. Sleeps while there is nothing to do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from baton.v1 import control_pb2, worker_pb2
from baton.worker.core import Request
from baton.worker.engine.adapters.directory import AdapterDirectory
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import ServingExecutor
from baton.worker.handover.handover import Handover
from baton.worker.handover.listener import HandoverListener
from baton.worker.kv.block_pool import PoolAudit
from baton.worker.kv.disk_tier.tier import DiskTier
from baton.worker.kv.event_log import Cache, EventLog
from baton.worker.link.ends import EngineEnd
from baton.worker.link.frames import Frame, Kind
from baton.worker.link.inbox import Inbox
from baton.worker.link.methods import Method
from baton.worker.link.prompts import split_prompts
from baton.worker.process.control import EngineControl
from baton.worker.process.lifecycle import Lifecycle
from baton.worker.process.lifecycle_actions import EngineLifecycleActions
from baton.worker.process.profiler import ProfilePlan, StepProfiler
from baton.worker.process.sessions import Sessions
from baton.worker.process.spans import SpanSender
from baton.worker.process.state_reporter import (
    StateReporter,
    disk_cache_message,
    host_cache_message,
    load_message,
    totals_message,
)
from baton.worker.process.step_trace import StepTrace
from baton.worker.process.steps.step_costs import StepCosts
from baton.worker.process.weight_updates import WeightUpdates
from baton.worker.requests.outputs import EngineListener, StepOutputs
from baton.worker.scheduling.background import is_background

_log = logging.getLogger(__name__)


class EngineLoop(EngineListener, HandoverListener):
    """Connects an engine to its link. Runs on the thread that made the engine, until STOP is received.

    Raises LinkClosed when the front is gone.
    """

    def __init__(
        self,
        link: EngineEnd,
        engine: Engine,
        executor: ServingExecutor,
        handover: Handover,
        identity: worker_pb2.WorkerState,
        profiler: StepProfiler,
        trace: StepTrace | None = None,
        spans: SpanSender | None = None,
        clock: Callable[[], float] = time.monotonic,
        inbox: Inbox | None = None,
        costs: StepCosts | None = None,
        cache: Cache | None = None,  # whose changes are reported; None: the engine's
        adapters: AdapterDirectory | None = None,  # that requests may name; None: no request has one
        disk: DiskTier | None = None,  # below host memory
    ) -> None:
        self._link = link
        self._costs = costs
        self._adapters = adapters
        self._disk = disk
        self._engine = engine
        self._executor = executor
        self._handover = handover
        self._identity = identity
        self._profiler = profiler
        self._spans = spans
        self._step = self._advance if trace is None else partial(trace.step, self._advance)
        self._watching = False
        self._clock = clock
        self._sessions = Sessions(
            engine,
            executor.model,
            identity.worker_id,
            link.send,
            handover,
            clock,
            counted=executor.max_step_tokens > 1,
            adapters=adapters,
        )
        self._events = EventLog(cache or engine, identity.worker_id, link.send, clock)
        actions = EngineLifecycleActions(self, engine, executor, handover, identity, link, self._end_drain)
        lifecycle = Lifecycle(actions, clock)
        updates = WeightUpdates(executor, lifecycle, inbox)
        self._control = EngineControl(self, link.send, lifecycle, clock, updates, adapters)
        self._state = StateReporter(self.state, lambda state: link.send(Kind.STATE, 0, state))
        if adapters is not None:
            adapters.changed = lambda: self._state.report(self._clock(), at_once=True)
        self._changing = False
        self._stopping = False
        self._held_back = False  # frames wait for the launch of the next step
        self._handlers: dict[int, Callable[[int, bytes], None]] = {
            Kind.STOP: self._on_stop,
            Kind.GENERATE_OPEN: lambda channel, _: self._sessions.open(channel),
            Kind.GENERATE: self._sessions.receive,
            Kind.GENERATE_HASHED: lambda channel, payload: self._sessions.receive(channel, *split_prompts(payload)),
            Kind.GENERATE_CLOSE: lambda channel, _: self._sessions.close(channel),
            Kind.CALL: self._control.call,
            Kind.PUBLISH_OPEN: lambda channel, _: self._events.open(channel),
            Kind.PUBLISH_CLOSE: lambda channel, _: self._events.close(channel),
            Kind.SNAPSHOT_WANTED: lambda channel, _: self._events.snapshot(),
            **handover.handlers,
        }
        engine.listen(self)
        handover.listen(self)
        if spans is not None:
            handover.listen(spans)

    def run(self, on_ready: Callable[[], object] | None = None) -> None:
        """Runs until STOP. Calls `on_ready` after READY was sent."""
        self._state.report(self._clock(), at_once=True)
        self._link.send(Kind.READY, 0, self._state.current())
        if on_ready is not None:
            self._link.flush()
            on_ready()
        while not self._stopping:
            self._turn(self._receive())
        self._link.flush()

    # For EngineControl.

    def state(self) -> worker_pb2.WorkerState:
        """Returns the worker's current state."""
        state = worker_pb2.WorkerState()
        state.CopyFrom(self._identity)
        state.epoch = self._engine.epoch
        state.draining = self._sessions.draining
        state.load.CopyFrom(
            load_message(self._engine.load(), self._executor.kv_spec, self._handover.transfer_bytes_per_second)
        )
        state.totals.CopyFrom(totals_message(self._engine.counters()))
        state.flows.extend(self._handover.flows())
        if self._adapters is not None:
            state.model.adapters.extend(self._adapters.infos())
            state.model.resolvable_adapters.extend(self._adapters.resolvable)
            state.adapters.extend(self._adapters.on_device())
        return state

    def counters(self) -> control_pb2.WorkerCounters:
        """Returns totals since the start."""
        totals, transfers = self._engine.counters(), self._handover.counters()
        return control_pb2.WorkerCounters(
            num_steps=totals.num_steps,
            num_prompt_tokens=totals.num_prompt_tokens,
            num_output_tokens=totals.num_output_tokens,
            num_cached_tokens=totals.num_cached_tokens,
            num_preemptions=totals.num_preemptions,
            num_finished=totals.num_finished,
            num_aborted=totals.num_aborted,
            num_failed=totals.num_failed,
            num_transfers=transfers.num_transfers + transfers.num_sent_transfers,
            num_transfer_bytes=transfers.num_transfer_bytes + transfers.num_sent_bytes,
            num_failed_transfers=transfers.num_failed_transfers + transfers.num_failed_pushes,
            num_expired_leases=transfers.num_expired_leases,
            num_checksum_errors=transfers.num_checksum_errors,
            num_local_fallbacks=totals.num_local_fallbacks,
            step_seconds=totals.step_seconds,
            num_evicted_blocks=totals.num_evicted_blocks,
            num_failed_steps=totals.num_failed_steps,
            num_discarded_tokens=totals.num_discarded_tokens,
            transfers=self._handover.counters_message(),
            host_cache=host_cache_message(totals),
            step_tokens=totals.step_tokens.message(),
            constraints=self._engine.grammar_stats().message(),
            num_transferred_tokens=totals.num_transferred_tokens,
            step_costs=None if self._costs is None else self._costs.message(),
            kv_residency=self._engine.residency_times().message(),
            speculation=totals.speculation_message() if self._executor.max_step_tokens > 1 else None,
            disk_cache=None if self._disk is None else disk_cache_message(self._disk),
            adapters=None if self._adapters is None else self._adapters.counters(),
        )

    def audit(self) -> PoolAudit:
        """Checks the whole block pool. Raises DataLoss."""
        return self._engine.audit()

    def count_blocks(self) -> PoolAudit:
        """Returns the pool's own counts. Cheap."""
        return self._engine.count_blocks()

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache. Returns the new epoch."""
        epoch = self._engine.reset_prefix_cache()
        self._events.collect()
        self._state.report(self._clock(), at_once=True)
        return epoch

    def num_deferred(self) -> int:
        """Returns the queued requests that wait for KV, a prefix or a grammar."""
        return self._engine.num_deferred

    def begin_drain(self) -> None:
        """Refuses new work."""
        self._sessions.draining = True
        self._handover.begin_drain()
        self._state.report(self._clock(), at_once=True)

    def _end_drain(self) -> None:
        self._sessions.draining = False
        self._state.report(self._clock(), at_once=True)

    def abort_all(self, reason: str) -> None:
        """Fails all running requests."""
        self._sessions.abort_all(reason)
        self._handover.abort_all(reason)

    def num_requests(self) -> int:
        """Returns the running requests of gateways and prefills of other workers."""
        return self._sessions.num_requests + self._handover.num_prefills

    def start_profile(self, plan: ProfilePlan) -> str:
        """Records steps by a plan. Returns the first trace's path."""
        return self._profiler.start(plan)

    def stop_profile(self) -> tuple[str, int]:
        """Returns the trace's path, and its number of steps."""
        return self._profiler.stop()

    def _receive(self) -> list[Frame]:
        """Waits for frames. Frames for background requests are sent once the next step is launched."""
        held_before, self._held_back = self._held_back, False
        working = self._engine.has_work() and not self._engine.waits
        if working and not held_before and not self._handover.num_open and self._sessions.are_patient:
            self._held_back = True
            return self._link.receive(0.0, flush=False)
        return self._link.receive(self._wait_seconds())

    def _turn(self, frames: list[Frame]) -> None:
        for kind, channel, payload in frames:
            if kind == Kind.CALL and payload[0] != Method.GET_STATS:
                self._engine.unwatch_steps()
            self._handlers[kind](channel, payload)
        self._engine.limits.paused = self._profiler.recording or self._control.changing
        self._handover.tick()
        if self._adapters is not None:
            self._adapters.check()
        outputs = self._step()
        self._sessions.report_waits()
        self._report_outputs(outputs)
        self._events.collect()
        self._control.check()
        if self._profiler.active:
            self._profiler.on_step()
        self._changing = bool(frames) or bool(outputs) or self._engine.has_work()
        self._state.report(self._clock())

    def _report_outputs(self, outputs: StepOutputs) -> None:
        """Reports outputs to other workers first, then to gateways, then to logs and traces."""
        self._handover.on_step(outputs)
        self._sessions.emit(outputs, may_wait=self._engine.has_work())
        for first in outputs.first_tokens:
            facts = {"request_id": first.request.request_id, "num_prompt_tokens": first.request.num_prompt_tokens}
            level = logging.DEBUG if is_background(first.request.priority) else logging.INFO
            _log.log(level, "prefill finished", extra=facts)
        if self._spans is not None and (outputs.finishes or outputs.failures or outputs.adapter_waits):
            self._spans.waited(outputs.adapter_waits)
            self._spans.finished(outputs.finishes)
            self._spans.failed(outputs.failures)

    # As EngineListener and HandoverListener.

    def on_admitted(self, requests: list[Request]) -> None:
        """Reports starts before the launch: gateways receive them even if the step ends this process."""
        if self._sessions.report_starts(requests):
            self._link.flush()

    def on_launched(self, began: float) -> None:
        """Sends what was held back, with the removals of this step."""
        if self._held_back:
            self._held_back = False
            self._events.collect()
            self._link.flush()

    def on_evicted(self) -> None:
        """Publishes removals while the step runs, not after it."""
        self._events.collect()
        self._link.flush()

    def on_first_token(self) -> None:
        """Sends the token before the rest of this turn, in which the launch of a step takes milliseconds."""
        self._report_outputs(self._engine.take_outputs())
        self._link.flush()

    def on_peer_died(self, request: Request, worker_id: str, reason: str) -> None:
        self._sessions.report_peer_loss(request, worker_id, reason)
        self._link.flush()

    def _advance(self) -> StepOutputs:
        """Runs a turn of the engine.

        While KV moves, does not wait for the step: frames and transfers are served meanwhile.
        """
        watching = self._handover.num_open > 0 or self._engine.wants_prefills
        if watching != self._watching:
            self._watching = watching
            self._executor.watch(self._link.wake if watching else None)
        return self._engine.step(wait=not watching)

    def _wait_seconds(self) -> float:
        """Returns how long the loop may wait for frames, until something is due."""
        if self._engine.has_work() and not self._engine.waits:
            return 0.0
        due = self._state.deadline(self._changing)
        parts = (self._events, self._control, self._handover, self._sessions)
        for deadline in (self._engine.next_deadline(), *(part.deadline for part in parts)):
            if deadline is not None and deadline < due:
                due = deadline
        return max(0.0, due - self._clock())

    def _on_stop(self, channel: int, payload: bytes) -> None:
        self._stopping = True
