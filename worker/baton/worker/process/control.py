"""ControlService on the engine's side: answers calls between two steps or later, and runs drains."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from google.protobuf.message import Message

from baton.rpc.errors import ServiceError, Unsupported, status_of
from baton.v1 import control_pb2, worker_pb2
from baton.worker.engine.adapters.directory import AdapterDirectory
from baton.worker.kv.block_pool import PoolAudit
from baton.worker.link.frames import Kind
from baton.worker.link.methods import Method
from baton.worker.process.lifecycle import Lifecycle, Refuse, Reply
from baton.worker.process.profiler import ProfilePlan
from baton.worker.process.weight_updates import WeightUpdates

_log = logging.getLogger(__name__)

Send = Callable[[int, int, bytes], None]  # kind, channel, payload


class ControlTarget(Protocol):
    """The operations of the engine and its loop that control uses."""

    def audit(self) -> PoolAudit:
        """Checks the whole block pool. Raises DataLoss."""

    def count_blocks(self) -> PoolAudit:
        """Returns the pool's own counts. Cheap."""

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache. Returns the new epoch."""

    def state(self) -> worker_pb2.WorkerState:
        """Returns the worker's current state."""

    def counters(self) -> control_pb2.WorkerCounters:
        """Returns totals since the start."""

    def begin_drain(self) -> None:
        """Refuses new work. Idempotent."""

    def abort_all(self, reason: str) -> None:
        """Fails all running requests."""

    def num_requests(self) -> int:
        """Returns the running requests of gateways and prefills of other workers."""

    def num_deferred(self) -> int:
        """Returns the queued requests that wait for KV, a prefix or a grammar."""

    def start_profile(self, plan: ProfilePlan) -> str:
        """Records steps by a plan. Returns the first trace's path."""

    def stop_profile(self) -> tuple[str, int]:
        """Returns the trace's path, and its number of steps."""


class EngineControl:
    """Answers calls. Only the engine thread uses it."""

    def __init__(
        self,
        target: ControlTarget,
        send: Send,
        lifecycle: Lifecycle,
        clock: Callable[[], float] = time.monotonic,
        updates: WeightUpdates | None = None,
        adapters: AdapterDirectory | None = None,
    ) -> None:
        self._target = target
        self._send = send
        self._lifecycle = lifecycle
        self._clock = clock
        self._forgets_when_idle = False
        self._idle_waiters: list[int] = []
        self._abort_at: float | None = None
        self._methods: dict[int, Callable[[bytes], bytes]] = {
            Method.DRAIN: self._drain,
            Method.GET_STATS: self._get_stats,
            Method.START_PROFILE: self._start_profile,
            Method.STOP_PROFILE: self._stop_profile,
            Method.RESUME: self._resume,
        }
        self._later: dict[int, Callable[[bytes, Reply, Refuse], None]] = {
            Method.PAUSE: lambda payload, *ends: lifecycle.pause(control_pb2.PauseRequest.FromString(payload), *ends),
            Method.RESET_PREFIX_CACHE: self._reset_prefix_cache,
            Method.SWITCH_ROLE: lambda payload, *ends: lifecycle.switch_role(
                control_pb2.SwitchRoleRequest.FromString(payload), *ends
            ),
            Method.SLEEP: lambda payload, *ends: lifecycle.sleep(control_pb2.SleepRequest.FromString(payload), *ends),
            Method.WAKE_UP: lambda payload, *ends: lifecycle.wake_up(
                control_pb2.WakeUpRequest.FromString(payload), *ends
            ),
            Method.RELOAD_WEIGHTS: lambda payload, *ends: lifecycle.reload(
                control_pb2.ReloadWeightsRequest.FromString(payload), *ends
            ),
        }

        self._adapters = adapters
        self._methods[Method.UNLOAD_ADAPTER] = self._unload_adapter
        self._later[Method.LOAD_ADAPTER] = self._load_adapter
        if updates is not None:
            self._methods[Method.START_WEIGHT_UPDATE] = updates.start
            self._methods[Method.ADD_WEIGHTS] = updates.add
            self._later[Method.FINISH_WEIGHT_UPDATE] = updates.finish

    @property
    def deadline(self) -> float | None:
        """When `check` must be called at the latest."""
        dues = [due for due in (self._abort_at, self._lifecycle.deadline) if due is not None]
        return min(dues, default=None)

    @property
    def changing(self) -> bool:
        """Whether a change of the lifecycle is in progress."""
        return self._lifecycle.deadline is not None

    def call(self, channel: int, payload: bytes) -> None:
        """Answers one call: at once, or later if it waits for requests or for a change."""
        if payload[0] == Method.AWAIT_IDLE:
            self._idle_waiters.append(channel)
            return
        try:
            if later := self._later.get(payload[0]):
                later(payload[1:], partial(self._reply, channel), partial(self._refuse, channel))
                return
            method = self._methods.get(payload[0])
            if method is None:
                raise Unsupported(f"the engine has no method {payload[0]}")
            self._send(Kind.REPLY, channel, method(payload[1:]))
        except ServiceError as error:
            self._refuse(channel, error)

    def check(self) -> None:
        """Ends a drain whose time is over, and answers calls that waited for the last request or for a change."""
        self._lifecycle.check()
        if self._abort_at is not None and self._clock() >= self._abort_at:
            self._abort_at = None
            if left := self._target.num_requests():
                _log.warning("the drain has timed out: aborting %d requests", left)
                self._target.abort_all("the worker is shutting down, and the request exceeded the drain's timeout")
        if self._forgets_when_idle and not self._target.num_requests():
            self._forgets_when_idle = False
            self._target.reset_prefix_cache()
        if self._idle_waiters and not self._target.num_requests():
            for channel in self._idle_waiters:
                self._send(Kind.REPLY, channel, b"")
            self._idle_waiters.clear()

    def _reply(self, channel: int, response: Message) -> None:
        self._send(Kind.REPLY, channel, response.SerializeToString())

    def _refuse(self, channel: int, error: ServiceError) -> None:
        self._send(Kind.REFUSAL, channel, status_of(error).SerializeToString())

    def _resume(self, payload: bytes) -> bytes:
        self._forgets_when_idle, self._abort_at = False, None
        return self._lifecycle.resume().SerializeToString()

    def _drain(self, payload: bytes) -> bytes:
        request = control_pb2.DrainRequest.FromString(payload)
        self._forgets_when_idle = self._forgets_when_idle or not self._lifecycle.draining
        self._lifecycle.draining = True
        self._target.begin_drain()
        if self._lifecycle.stopped:
            self._target.abort_all("the worker is draining, and the request was kept by a pause or sleep")
        self._abort_at = self._clock() + request.timeout_ms / 1000 if request.timeout_ms else None
        return control_pb2.DrainResponse(num_requests=self._target.num_requests()).SerializeToString()

    def _get_stats(self, payload: bytes) -> bytes:
        request = control_pb2.GetStatsRequest.FromString(payload)
        audit = self._target.audit() if request.audit else self._target.count_blocks()
        return control_pb2.GetStatsResponse(
            state=self._target.state(),
            counters=self._target.counters(),
            num_held_blocks=audit.num_held_blocks,
            num_leased_blocks=audit.num_leased_blocks,
            num_cached_blocks=audit.num_cached_blocks,
            num_empty_blocks=audit.num_empty_blocks,
            num_indexed_blocks=audit.num_indexed_blocks,
            activity=self._lifecycle.activity,
            sleep_level=self._lifecycle.sleep_level,
            asleep=[part.number for part in sorted(self._lifecycle.asleep)],
            num_deferred=self._target.num_deferred(),
        ).SerializeToString()

    def _reset_prefix_cache(self, payload: bytes, reply: Reply, refuse: Refuse) -> None:
        if control_pb2.ResetPrefixCacheRequest.FromString(payload).recompute_running:
            self._lifecycle.forget_blocks(reply, refuse)
            return
        epoch = self._target.reset_prefix_cache()
        _log.info("prefix cache reset: epoch %d", epoch)
        reply(control_pb2.ResetPrefixCacheResponse(epoch=epoch))

    def _load_adapter(self, payload: bytes, reply: Reply, refuse: Refuse) -> None:
        self._require_adapters().load(control_pb2.LoadAdapterRequest.FromString(payload), reply, refuse)

    def _unload_adapter(self, payload: bytes) -> bytes:
        request = control_pb2.UnloadAdapterRequest.FromString(payload)
        return self._require_adapters().unload(request.name).SerializeToString()

    def _require_adapters(self) -> AdapterDirectory:
        if self._adapters is None:
            raise Unsupported("this worker was started without --enable-lora", field="lora_name")
        return self._adapters

    def _start_profile(self, payload: bytes) -> bytes:
        request = control_pb2.StartProfileRequest.FromString(payload)
        plan = ProfilePlan(request.num_steps, request.delay_steps, request.num_profiles or 1)
        path = self._target.start_profile(plan)
        return control_pb2.StartProfileResponse(path=path).SerializeToString()

    def _stop_profile(self, payload: bytes) -> bytes:
        path, num_steps = self._target.stop_profile()
        return control_pb2.StopProfileResponse(path=path, num_steps=num_steps).SerializeToString()
