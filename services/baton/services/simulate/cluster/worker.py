"""One simulated worker: what the engine process's loop does, turn by turn, as events of the timeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from baton.rpc.errors import ServiceError
from baton.services.simulate.cluster.adapters import VirtualAdapters, VirtualLoads
from baton.services.simulate.cluster.engine import CacheEvent, Coast, VirtualEngine
from baton.services.simulate.cluster.executor import VirtualExecutor
from baton.services.simulate.cluster.network import Network, NetworkLink, VirtualHeartbeat, VirtualTransport
from baton.services.simulate.cluster.settings import ClusterSettings
from baton.services.simulate.virtual.timeline import Clock
from baton.v1 import types_pb2, worker_pb2
from baton.worker.core import BlockHash, Request
from baton.worker.engine.adapters.pool import AdapterPool
from baton.worker.handover.handover import Handover
from baton.worker.handover.settings import HandoverSettings
from baton.worker.kv.cache_events import RemovedEvent
from baton.worker.kv.event_log import EventLog
from baton.worker.link.frames import Kind
from baton.worker.process.state_reporter import load_message, model_message
from baton.worker.requests.outputs import EngineListener, StepOutputs
from baton.worker.requests.state import RequestState
from baton.worker.transfer.layout import layout_message

MODEL = "simulated"
_ROLES = {
    "both": types_pb2.WORKER_ROLE_BOTH,
    "prefill": types_pb2.WORKER_ROLE_PREFILL,
    "decode": types_pb2.WORKER_ROLE_DECODE,
}
_MIN_REPORT_SECONDS = 0.1  # as StateReporter
_MAX_REPORT_SECONDS = 1.0


class SimWorker(EngineListener):
    """An engine, its hand-over and its inbox.

    Calls `on_outputs` with each step's outputs at the time they leave the worker.


    While nothing needs a decision the worker takes no steps, and catches up when it is observed (`observe`).
    """

    def __init__(
        self,
        worker_id: str,
        role: str,
        settings: ClusterSettings,
        network: Network,
        epoch: int,
        on_outputs: Callable[[SimWorker, StepOutputs], None],
        on_refused: Callable[[SimWorker, Request, ServiceError], None],
    ) -> None:
        self.worker_id = self.address = worker_id
        self.role = role
        self.alive = True
        self.clock = Clock(network.timeline.clock.now)  # runs ahead while a step is computed
        self.observable_at = 0.0  # when `observe` may find something new
        self._settings = settings
        self._timeline = network.timeline
        self._on_outputs = on_outputs
        self._on_refused = on_refused
        self._inbox: deque[Callable[[], None]] = deque()
        self._turn_at: float | None = None
        self._layers_at: float | None = None  # time of the next call of the layer hook
        self._coast: Coast | None = None
        self._executor = VirtualExecutor(
            settings.device,
            self.clock,
            settings.num_blocks,
            settings.block_size,
            settings.max_model_len,
            settings.engine.max_num_requests,
            settings.state_blocks,
            settings.drafts,
            settings.acceptance,
        )
        self._executor.adapters = adapters = VirtualAdapters(settings.adapters)
        loads = VirtualLoads(settings.adapters, self.clock)
        pool: AdapterPool[RequestState] = AdapterPool(adapters, settings.adapters.num_host, loads, self.clock)
        self.engine = VirtualEngine(
            self._executor, settings.device, settings.engine, epoch, self.clock, self._send_events, pool
        )
        self.engine.listen(self)
        self.event_log: EventLog | None = None  # publishes, where there is a kvstore
        self.handover = self._make_handover(network)
        self._identity = worker_pb2.WorkerState(
            worker_id=worker_id,
            role=_ROLES[role],
            model=model_message(MODEL, self._executor.model, self.engine.max_model_len, settings.block_size),
            layout=layout_message(self._executor.kv_spec),
        )
        self._reported_at = float("-inf")
        self._is_changed = True  # since the last report
        self._reports: deque[tuple[float, worker_pb2.WorkerState]] = deque()  # on their way, by arrival
        self._events: deque[tuple[float, list[CacheEvent]]] = deque()
        network.join(self)
        self._report(self.clock.now)

    @property
    def endpoint(self) -> types_pb2.Endpoint:
        return types_pb2.Endpoint(worker_id=self.worker_id, epoch=self.engine.epoch, address=self.address)

    # What reaches the worker.

    def submit(
        self, request: Request, prefill: types_pb2.Endpoint | None, block_hashes: list[BlockHash] | None = None
    ) -> None:
        """Takes a generation now, with the prompt's hashes if they are known."""
        if block_hashes is not None:
            self.engine.know_hashes(request.request_id, block_hashes)
        self._receive(lambda: self._submit(request, prefill))

    def abort(self, request_id: str) -> None:
        self._receive(lambda: self.engine.abort(request_id))

    def reset_prefix_cache(self) -> None:
        """Empties the cache for an operator."""
        self._receive(self._reset)

    def frame(self, kind: int, channel: int, payload: bytes) -> None:
        """Takes a frame of a hand-over's stream."""
        self._receive(lambda: self.handover.handlers[kind](channel, payload))

    def publish(self, send: Callable[[int, int, bytes], None]) -> None:
        """Starts to number and send cache events, as the engine process does."""
        self.event_log = EventLog(self.engine, self.worker_id, send, self.clock)

    def publish_frame(self, kind: int, channel: int) -> None:
        """Takes an opened or closed stream of the publisher, or its request for a snapshot."""
        self._receive(lambda: self._on_publish_frame(kind, channel))

    def wake(self) -> None:
        """Takes the transport's events."""
        if self.alive:
            self._interrupt()

    def kill(self) -> None:
        """Kills the worker without a shutdown."""
        if self._coast is not None:
            self.observe(self._timeline.clock.now)
            self.engine.end_coast(self._coast)
        self.alive = False
        self._turn_at = self._coast = None
        self._inbox.clear()
        self.handover.close()

    # What leaves it.

    def observe(self, now: float) -> None:
        """Takes the steps that have begun by now, so that reports, events and the pool are those of now."""
        coast = self._coast
        if coast is None:
            if self._turn_at is None or self._turn_at > now:
                self._report_idle(now)
        else:
            while (due := self._next_report(coast, now)) is not None:
                self._take_steps(coast, due)
                self._report(due)
            # Events that no router can have received are sent with the next report.
            if self._settings.exact or self.engine.next_change(coast) + self._settings.delays.removals <= now:
                self._take_steps(coast, now)
        self._set_observable()

    def take_reports(self, now: float) -> list[tuple[float, worker_pb2.WorkerState]]:
        """Returns the states that have reached the router by now, with their times."""
        arrived = []
        while self._reports and self._reports[0][0] <= now:
            arrived.append(self._reports.popleft())
        return arrived

    def take_events(self, now: float) -> list[CacheEvent]:
        """Returns the cache events that have reached the router by now."""
        arrived: list[CacheEvent] = []
        while self._events and self._events[0][0] <= now:
            arrived += self._events.popleft()[1]
        return arrived

    def state(self) -> worker_pb2.WorkerState:
        """Returns the state at the worker's own time."""
        state = worker_pb2.WorkerState()
        state.CopyFrom(self._identity)
        state.epoch = self.engine.epoch
        rate = self.handover.transfer_bytes_per_second
        state.load.CopyFrom(load_message(self.engine.load(), self._executor.kv_spec, rate))
        state.adapters.extend(self.engine.adapters_on_device())
        return state

    # The loop.

    def _receive(self, message: Callable[[], None]) -> None:
        if not self.alive:
            return
        self._inbox.append(message)
        self._interrupt()

    def _interrupt(self) -> None:
        """Schedules a turn for when the loop reads its inbox: now, or after the running step."""
        now = self._timeline.clock.now
        coast = self._coast
        free_at = coast.boundary(now) if coast is not None else max(now, self.clock.now)
        if self._turn_at is None or free_at < self._turn_at:
            self._schedule(free_at)

    def _schedule(self, time: float) -> None:
        self._turn_at = time
        self._timeline.at(time, lambda: self._turn(time))

    def _turn(self, time: float) -> None:
        if self._turn_at != time or not self.alive:
            return  # another turn took its place
        coast, self._coast = self._coast, None
        if coast is not None:
            self._coast = coast
            self.observe(time)
            self._take_steps(coast, time)
            self.engine.end_coast(coast)
            self._coast = None
        self._turn_at = None
        self.clock.now = time
        while self._inbox:
            self._inbox.popleft()()
        self.handover.tick()
        outputs = self.engine.step(wait=not self.handover.num_open and not self.engine.wants_prefills)
        self.handover.on_step(outputs)
        self._on_outputs(self, outputs)
        self._is_changed = True
        self._collect_events()
        ended = self.clock.now
        if ended - self._reported_at >= _MIN_REPORT_SECONDS:
            self._report(ended)
        self._plan_next(ended)
        self._set_observable()

    def _plan_next(self, now: float) -> None:
        if self.engine.waits:
            self._follow_step()
            return
        deadlines = [self.engine.next_deadline(), self.handover.deadline]
        if self.event_log is not None:
            deadlines.append(self.event_log.deadline)
        limit = min((one for one in deadlines if one is not None), default=None)
        if not self.engine.has_work():
            if limit is not None:
                self._schedule(max(now, limit))
            return
        # While KV moves, messages are read beside the steps.
        coasts = self._settings.coast and not self.handover.num_open
        # A publisher sends every change as it happens.
        coast = self.engine.plan_coast(now, changes=self.event_log is None) if coasts else None
        self._coast = coast
        if coast is None:
            self._schedule(now)
        else:
            self._schedule(coast.end if limit is None else min(coast.end, coast.boundary(limit)))

    def _follow_step(self) -> None:
        """Reads messages during the running step while KV moves, and reports layers when they are written."""
        due = ends = self._executor.ends
        if (limit := self.handover.deadline) is not None:
            due = min(due, max(limit, self.clock.now))
        self._schedule(due)
        self._expect_layer(ends)

    def _expect_layer(self, ends: float) -> None:
        layer_at = self._executor.next_layer()
        if layer_at is not None and layer_at < ends and layer_at != self._layers_at:
            self._layers_at = layer_at
            self._timeline.at(layer_at, self._call_layer_hook)

    def _call_layer_hook(self) -> None:
        now = self._timeline.clock.now
        if now == self._layers_at:
            self._layers_at = None
        if not self.alive or not self.engine.waits or self._executor.ends <= now:
            return
        self.clock.now = max(self.clock.now, now)
        self._executor.call_layer_hook(now)
        layer_at = self._executor.next_layer()
        if layer_at is not None and now < layer_at:
            self._expect_layer(self._executor.ends)

    def _submit(self, request: Request, prefill: types_pb2.Endpoint | None) -> None:
        try:
            self.engine.submit(request)
        except ServiceError as error:
            self._on_refused(self, request, error)
            return
        if prefill is not None and request.remote_prefill:
            self.handover.expect(request, prefill)

    def _on_publish_frame(self, kind: int, channel: int) -> None:
        assert self.event_log is not None, "only workers with a log publish"
        if kind == Kind.PUBLISH_OPEN:
            self.event_log.open(channel)
        elif kind == Kind.PUBLISH_CLOSE:
            self.event_log.close(channel)
        else:
            self.event_log.snapshot()

    def _reset(self) -> None:
        self.engine.reset_prefix_cache()
        self._events.clear()
        self._collect_events()
        self._report(self.clock.now)

    # Reports and events.

    def on_evicted(self) -> None:
        self._collect_events()

    def _take_steps(self, coast: Coast, until: float) -> None:
        self.engine.take_steps(coast, until)
        self.clock.now = coast.now
        self._is_changed = True

    def _next_report(self, coast: Coast, now: float) -> float | None:
        """Returns when a report is due in the coast; without `exact` the last one before now, which replaces others."""
        due = coast.boundary_after(self._reported_at, _MIN_REPORT_SECONDS)
        if due is None or due > now:
            return None
        while not self._settings.exact:
            later = coast.boundary_after(due, _MIN_REPORT_SECONDS)
            if later is None or later > now - self._settings.delays.report:
                break
            due = later
        return due

    def _collect_events(self) -> None:
        if self.event_log is not None:
            self.event_log.collect()
            return
        events = self.engine.take_events()
        if events:
            self._send_events(self.clock.now, events)

    def _send_events(self, time: float, events: list[CacheEvent]) -> None:
        """Sends removals at once, together with events that waited for their batch."""
        if any(isinstance(event, RemovedEvent) for event in events):
            arrives = time + self._settings.delays.removals
            waiting = self._events
            for place, (due, batch) in enumerate(waiting):
                if due > arrives:
                    waiting[place] = (arrives, batch)
        else:
            arrives = time + self._settings.delays.events
        self._events.append((arrives, events))

    def _report(self, time: float) -> None:
        self._reports.append((time + self._settings.delays.report, self.state()))
        self._reported_at = time
        self._is_changed = False

    def _report_idle(self, now: float) -> None:
        """Lets an idle loop report changes once, and then every second."""
        if self.clock.now > now:
            return  # inside a step
        due = max(self._reported_at + _MIN_REPORT_SECONDS, self.clock.now)
        if self._is_changed and due <= now:
            self._report(due)
        num_missed = int((now - self._reported_at) / _MAX_REPORT_SECONDS)
        if num_missed:
            self._report(self._reported_at + num_missed * _MAX_REPORT_SECONDS)

    def _set_observable(self) -> None:
        """Delays events to the next report, which is due every tenth of a second, unless `exact`."""
        if self._settings.exact and (self._coast is not None or self._events):
            self.observable_at = 0.0
        else:
            due = self._reported_at + _MIN_REPORT_SECONDS
            self.observable_at = min(due, self._reports[0][0]) if self._reports else due

    def _make_handover(self, network: Network) -> Handover:
        spec = self._executor.kv_spec
        transport = VirtualTransport(
            network,
            self,
            self.clock,
            spec.num_layers,
            spec.layer_bytes(0),
            self._settings.device.transfer_bytes_per_second,
        )
        return Handover(
            self.engine,
            self._executor,
            transport,
            NetworkLink(network, self, self.clock),
            self.worker_id,
            HandoverSettings(),
            self.clock,
            VirtualHeartbeat(network.timeline),
        )
