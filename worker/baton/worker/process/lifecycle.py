"""Pause, sleep, wake-up and reload on the engine's side: their order, and what happens to running requests.

A change has two parts. First, weights are read while the engine runs, if the change needs any. Then the engine stops,
the change is made between two steps, and the engine continues. Only the engine thread uses it, except to read weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from google.protobuf.message import Message

from baton.rpc.errors import DeadlineExceeded, InternalError, InvalidRequest, Mismatch, ServiceError
from baton.v1 import control_pb2 as pb
from baton.v1 import types_pb2
from baton.worker.executors.base import NewWeights
from baton.worker.executors.memory_part import ALL_PARTS, MemoryPart

_log = logging.getLogger(__name__)

_DEFAULT_SECONDS = 60.0
_CHECK_SECONDS = 0.02  # between checks while a change waits

Reply = Callable[[Message], None]
Refuse = Callable[[ServiceError], None]
Running = pb.RunningRequests


class LifecycleActions(Protocol):
    """The operations of the engine and its loop that a change uses."""

    def begin_drain(self) -> None:
        """Refuses new work. Idempotent."""

    def end_drain(self) -> None:
        """Accepts new work again. Idempotent."""

    def abort_all(self, reason: str) -> None:
        """Fails all running requests."""

    def abort_prefills(self, reason: str) -> None:
        """Fails the prefills of other workers, which then compute them themselves."""

    def num_requests(self) -> int:
        """Returns the running requests of gateways and prefills of other workers."""

    def freeze(self, frozen: bool) -> None:
        """Stops launching steps, or launches them again."""

    def settled(self) -> bool:
        """Returns whether no step is in flight and no peer may write a block."""

    def num_open_transfers(self) -> int:
        """Returns the hand-overs that have not ended."""

    def forget_blocks(self) -> int:
        """Empties every block; requests that held some are recomputed. Returns the new epoch. Only while settled."""

    def epoch(self) -> int:
        """Returns the epoch of the cache."""

    def read_weights(self, model: str) -> NewWeights:
        """Reads weights, on any thread. Raises a ServiceError."""

    def use_weights(self, new: NewWeights) -> None:
        """Replaces the weights. Only while settled."""

    def sleep(self, level: int) -> int:
        """Frees memory. Returns the free bytes."""

    def wake(self, new: NewWeights | None, parts: frozenset[MemoryPart]) -> None:
        """Takes the memory of these parts back. Raises a ServiceError, and they stay asleep."""

    def switch_role(self, role: types_pb2.WorkerRole.ValueType) -> types_pb2.WorkerRole.ValueType:
        """Reports this role from now on. Returns the one before."""

    def wake_loop(self) -> None:
        """Makes the loop call `check` soon. Thread-safe."""


@dataclass(slots=True)
class _Change:
    """A change in progress."""

    name: str
    running: int  # a RunningRequests value
    seconds: float  # for running requests to end, once the engine stops
    apply: Callable[[NewWeights | None], Message]
    reply: Reply
    refuse: Refuse
    reading: _Reading | None = None
    deadline: float | None = None  # None: the engine has not begun to stop


class _Reading:
    """Reads weights on a thread of its own."""

    def __init__(self, actions: LifecycleActions, read: Callable[[], NewWeights]) -> None:
        self.new: NewWeights | None = None
        self.error: ServiceError | None = None
        self.done = False
        self._actions = actions
        self._read = read
        threading.Thread(target=self._run, name="weights", daemon=True).start()

    def _run(self) -> None:
        try:
            self.new = self._read()
        except ServiceError as error:
            self.error = error
        except Exception as error:  # any error that a file can cause
            _log.exception("the weights cannot be read")
            self.error = InternalError(f"the weights cannot be read: {type(error).__name__}: {error}")
        self.done = True
        self._actions.wake_loop()


class Lifecycle:
    """The lifecycle of one worker. Drain sets `draining`; only Resume ends it."""

    def __init__(self, actions: LifecycleActions, clock: Callable[[], float] = time.monotonic) -> None:
        self._actions = actions
        self._clock = clock
        self._change: _Change | None = None
        self._paused = False
        self._freed = False  # whether the weights were dropped
        self.draining = False
        self.sleep_level = 0
        self.asleep: frozenset[MemoryPart] = frozenset()

    @property
    def activity(self) -> pb.WorkerActivity.ValueType:
        """The current activity. During a change, the activity before it."""
        if self.sleep_level:
            return pb.WORKER_ACTIVITY_ASLEEP
        if self._paused:
            return pb.WORKER_ACTIVITY_PAUSED
        return pb.WORKER_ACTIVITY_DRAINING if self.draining else pb.WORKER_ACTIVITY_SERVING

    @property
    def stopped(self) -> bool:
        """Whether kept requests are stopped."""
        return self._paused or self.sleep_level > 0

    @property
    def deadline(self) -> float | None:
        """When `check` must be called at the latest. None: no change is in progress."""
        return None if self._change is None else self._clock() + _CHECK_SECONDS

    def pause(self, request: pb.PauseRequest, reply: Reply, refuse: Refuse) -> None:
        """Stops the engine. Replies once it is stopped."""
        self._check_unchanging()
        self._check_awake("Pause")

        def apply(_: NewWeights | None) -> pb.PauseResponse:
            self._paused = True
            return pb.PauseResponse(num_requests=self._actions.num_requests())

        seconds = _seconds(request.timeout_ms)
        self._begin(_Change("pause", request.running_requests, seconds, apply, reply, refuse))

    def resume(self) -> pb.ResumeResponse:
        """Ends a pause, and a drain."""
        self._check_unchanging()
        self._check_awake("Resume")
        self._paused = self.draining = False
        self._continue()
        return pb.ResumeResponse()

    def sleep(self, request: pb.SleepRequest, reply: Reply, refuse: Refuse) -> None:
        """Stops the engine and frees memory. Replies once that is done."""
        self._check_unchanging()
        level = request.level or 1
        if level > 2:
            raise InvalidRequest(f"level={level}: it must be 1 or 2", field="level")

        def apply(_: NewWeights | None) -> pb.SleepResponse:
            if level <= self.sleep_level and self.asleep == ALL_PARTS:
                return pb.SleepResponse(num_requests=self._actions.num_requests(), epoch=self._actions.epoch())
            epoch = self._actions.forget_blocks()
            freed = self._actions.sleep(level)
            self.sleep_level, self._freed, self.asleep = level, level > 1, ALL_PARTS
            num_requests = self._actions.num_requests()
            _log.info("asleep: level %d, %d bytes free, %d requests kept", level, freed, num_requests)
            return pb.SleepResponse(num_freed_bytes=freed, num_requests=num_requests, epoch=epoch)

        kept = self.sleep_level and request.running_requests == Running.RUNNING_REQUESTS_WAIT
        running = Running.RUNNING_REQUESTS_KEEP if kept else request.running_requests
        self._begin(_Change("sleep", running, _seconds(request.timeout_ms), apply, reply, refuse))

    def wake_up(self, request: pb.WakeUpRequest, reply: Reply, refuse: Refuse) -> None:
        """Takes memory back. With all of it, accepts requests again unless the worker drains."""
        self._check_unchanging()
        woken = self._parts_of(request) & self.asleep
        if not woken:
            reply(pb.WakeUpResponse(epoch=self._actions.epoch()))
            return

        def apply(new: NewWeights | None) -> pb.WakeUpResponse:
            self._actions.wake(new, woken)
            self.asleep -= woken
            self._freed = self._freed and MemoryPart.WEIGHTS in self.asleep
            if self.asleep:
                self.sleep_level = 2 if self._freed else 1
            else:
                self.sleep_level, self._paused = 0, False
            _log.info("awake: %s; asleep: %s", _names(woken), _names(self.asleep) or "nothing")
            return pb.WakeUpResponse(epoch=self._actions.epoch())

        reads = self._freed and MemoryPart.WEIGHTS in woken
        reading = _Reading(self._actions, partial(self._actions.read_weights, "")) if reads else None
        keep = Running.RUNNING_REQUESTS_KEEP
        self._begin(_Change("wake-up", keep, _DEFAULT_SECONDS, apply, reply, refuse, reading))

    def reload(
        self,
        request: pb.ReloadWeightsRequest,
        reply: Reply,
        refuse: Refuse,
        read: Callable[[], NewWeights] | None = None,
    ) -> None:
        """Reads weights, then stops the engine and replaces its weights. `read` None: reads the request's model."""
        self._check_unchanging()
        if MemoryPart.WEIGHTS in self.asleep:
            self._check_awake("ReloadWeights")

        def apply(new: NewWeights | None) -> pb.ReloadWeightsResponse:
            assert new is not None, "a reload reads weights"
            self._actions.use_weights(new)
            epoch = self._actions.forget_blocks()
            num_requests = self._actions.num_requests()
            _log.info("weights reloaded from %s: epoch %d, %d requests kept", new.model, epoch, num_requests)
            return pb.ReloadWeightsResponse(digest=new.digest, epoch=epoch, num_requests=num_requests)

        reading = _Reading(self._actions, read or partial(self._actions.read_weights, request.model))
        seconds = _seconds(request.timeout_ms)
        self._begin(_Change("reload", request.running_requests, seconds, apply, reply, refuse, reading))

    def switch_role(self, request: pb.SwitchRoleRequest, reply: Reply, refuse: Refuse) -> None:
        """Changes the role once running requests were handled as requested. Cached blocks stay."""
        self._check_unchanging()
        self._check_awake("SwitchRole")
        role = request.role
        if role == types_pb2.WORKER_ROLE_UNSPECIFIED or role not in types_pb2.WorkerRole.values():
            raise InvalidRequest(f"role={role}: it must be prefill, decode or both", field="role")

        def apply(_: NewWeights | None) -> pb.SwitchRoleResponse:
            before = self._actions.switch_role(role)
            _log.info("role: %s before, %s now", *map(types_pb2.WorkerRole.Name, (before, role)))
            return pb.SwitchRoleResponse(before=before, num_requests=self._actions.num_requests())

        seconds = _seconds(request.timeout_ms)
        self._begin(_Change("switch of the role", request.running_requests, seconds, apply, reply, refuse))

    def forget_blocks(self, reply: Reply, refuse: Refuse) -> None:
        """Empties the cache and the blocks of running requests, which are then computed again."""
        self._check_unchanging()

        def apply(_: NewWeights | None) -> pb.ResetPrefixCacheResponse:
            epoch = self._actions.forget_blocks()
            _log.info("prefix cache reset: epoch %d, %d requests start again", epoch, self._actions.num_requests())
            return pb.ResetPrefixCacheResponse(epoch=epoch)

        keep = Running.RUNNING_REQUESTS_KEEP
        self._begin(_Change("reset", keep, _DEFAULT_SECONDS, apply, reply, refuse))

    def check(self) -> None:
        """Advances the change in progress, if it can."""
        change = self._change
        if change is None:
            return
        if change.reading is not None and not change.reading.done:
            return
        if change.reading is not None and change.reading.error is not None:
            self._end(change, change.reading.error)
        elif change.deadline is None:
            self._stop_requests(change)
        elif self._is_quiet(change):
            self._apply(change)
        elif self._clock() >= change.deadline:
            left, seconds = self._actions.num_requests(), change.seconds
            error = DeadlineExceeded(f"{left} requests were still running {seconds:g} s after the {change.name} began")
            self._end(change, error)

    def _begin(self, change: _Change) -> None:
        self._change = change
        self.check()

    def _stop_requests(self, change: _Change) -> None:
        change.deadline = self._clock() + change.seconds
        reason = f"the worker was stopped for a {change.name}"
        self._actions.begin_drain()
        if change.running == Running.RUNNING_REQUESTS_KEEP:
            self._actions.abort_prefills(reason)
        elif change.running == Running.RUNNING_REQUESTS_WAIT:
            self._actions.freeze(False)  # requests that a pause kept run to their end, too
        else:
            self._actions.abort_all(reason)
        self.check()

    def _is_quiet(self, change: _Change) -> bool:
        """Returns whether nothing is left to wait for. Freezes kept requests once no hand-over needs them."""
        if self._actions.num_open_transfers():
            return False
        if change.running == Running.RUNNING_REQUESTS_KEEP:
            self._actions.freeze(True)
        elif self._actions.num_requests():
            return False
        return self._actions.settled()

    def _apply(self, change: _Change) -> None:
        self._actions.freeze(True)
        try:
            answer = change.apply(None if change.reading is None else change.reading.new)
        except ServiceError as error:
            self._end(change, error)
            return
        except Exception as error:
            _log.exception("the %s failed", change.name)
            self._end(change, InternalError(f"the {change.name} failed: {type(error).__name__}: {error}"))
            return
        self._change = None
        self._continue()
        change.reply(answer)

    def _end(self, change: _Change, error: ServiceError) -> None:
        _log.warning("%s failed: %s", change.name, error.message)
        self._change = None
        self._continue()
        change.refuse(error)

    def _continue(self) -> None:
        """Continues according to the activity."""
        self._actions.freeze(self.stopped)
        if not self.stopped and not self.draining:
            self._actions.end_drain()

    def _check_unchanging(self) -> None:
        if self._change is not None:
            raise Mismatch(f"a {self._change.name} is in progress: retry after its reply")

    def _parts_of(self, request: pb.WakeUpRequest) -> frozenset[MemoryPart]:
        known = {int(part) for part in ALL_PARTS}
        if unknown := [part for part in request.parts if part not in known]:
            raise InvalidRequest(f"parts names {unknown[0]}: they must be weights and kv_cache", field="parts")
        return frozenset(map(MemoryPart, request.parts)) or ALL_PARTS

    def _check_awake(self, method: str) -> None:
        if self.sleep_level:
            raise Mismatch(f"the worker is asleep (level {self.sleep_level}): call WakeUp before {method}")


def _names(parts: frozenset[MemoryPart]) -> str:
    return ", ".join(part.name.lower() for part in sorted(parts))


def _seconds(timeout_ms: int) -> float:
    return timeout_ms / 1000 if timeout_ms else _DEFAULT_SECONDS
