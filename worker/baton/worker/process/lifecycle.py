"""Pause, sleep, wake and reload on the engine's side: which comes when, and what becomes of the requests.

A change has two parts: weights are read beside the running engine, where any are wanted; then the engine comes to a
halt, the change is made between two steps, and it goes on. Used by the engine thread only, but for what reads weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import Message

from baton.rpc.errors import DeadlineExceeded, InternalError, InvalidRequest, Mismatch, ServiceError
from baton.v1 import control_pb2 as pb
from baton.worker.executors.base import NewWeights

_log = logging.getLogger(__name__)

_DEFAULT_SECONDS = 60.0
_LOOK_SECONDS = 0.02  # while a change waits

Reply = Callable[[Message], None]
Refuse = Callable[[ServiceError], None]
Running = pb.RunningRequests


class LifecycleActions(Protocol):
    """What a change needs of the engine and of what surrounds it."""

    def begin_drain(self) -> None:
        """Takes no new work from now on. Idempotent."""

    def end_drain(self) -> None:
        """Takes new work again. Idempotent."""

    def abort_all(self, reason: str) -> None:
        """Fails what still runs."""

    def abort_prefills(self, reason: str) -> None:
        """Fails the prefills of other workers, which compute them themselves."""

    def num_requests(self) -> int:
        """Requests of gateways and prefills of other workers that still run."""

    def freeze(self, frozen: bool) -> None:
        """Computes no step that is not in flight. Or again."""

    def settled(self) -> bool:
        """Whether no step is in flight and nobody may write a block from elsewhere."""

    def num_open_transfers(self) -> int:
        """Hand-overs that are not over."""

    def forget_blocks(self) -> int:
        """Every block is empty, and what held some is computed again. Returns the new epoch. While settled, only."""

    def epoch(self) -> int:
        """Of the cache."""

    def read_weights(self, model: str) -> NewWeights:
        """On any thread. Raises a ServiceError."""

    def use_weights(self, new: NewWeights) -> None:
        """While settled, only."""

    def sleep(self, level: int) -> int:
        """Bytes that are free now."""

    def wake(self, new: NewWeights | None) -> None:
        """Raises a ServiceError, and sleeps on."""

    def wake_loop(self) -> None:
        """Something is to be looked at. Thread-safe."""


@dataclass(slots=True)
class _Change:
    """One that is under way."""

    name: str
    running: int  # RunningRequests
    seconds: float  # for requests to end, from when they are asked to
    apply: Callable[[NewWeights | None], Message]
    reply: Reply
    refuse: Refuse
    reading: _Reading | None = None
    deadline: float | None = None  # None: the halt has not begun


class _Reading:
    """Weights on their way, on a thread of their own."""

    def __init__(self, actions: LifecycleActions, model: str) -> None:
        self.new: NewWeights | None = None
        self.error: ServiceError | None = None
        self.done = False
        self._actions = actions
        self._model = model
        threading.Thread(target=self._run, name="weights", daemon=True).start()

    def _run(self) -> None:
        try:
            self.new = self._actions.read_weights(self._model)
        except ServiceError as error:
            self.error = error
        except Exception as error:  # whatever a file can raise
            _log.exception("weights could not be read")
            self.error = InternalError(f"the weights could not be read: {type(error).__name__}: {error}")
        self.done = True
        self._actions.wake_loop()


class Lifecycle:
    """One worker's. `draining` is Drain's; it outlives all changes but Resume."""

    def __init__(self, actions: LifecycleActions, clock: Callable[[], float] = time.monotonic) -> None:
        self._actions = actions
        self._clock = clock
        self._change: _Change | None = None
        self._paused = False
        self._dropped = False  # the weights
        self.draining = False
        self.sleep_level = 0

    @property
    def activity(self) -> pb.WorkerActivity.ValueType:
        """As of now. During a change it is that before it."""
        if self.sleep_level:
            return pb.WORKER_ACTIVITY_ASLEEP
        if self._paused:
            return pb.WORKER_ACTIVITY_PAUSED
        return pb.WORKER_ACTIVITY_DRAINING if self.draining else pb.WORKER_ACTIVITY_SERVING

    @property
    def stopped(self) -> bool:
        """Whether kept requests do not run."""
        return self._paused or self.sleep_level > 0

    @property
    def deadline(self) -> float | None:
        """When `check` must be called at the latest. None: nothing is under way."""
        return None if self._change is None else self._clock() + _LOOK_SECONDS

    def pause(self, request: pb.PauseRequest, reply: Reply, refuse: Refuse) -> None:
        """Halts. The reply comes when that is so."""
        self._check_free()
        self._check_awake("Pause")

        def apply(_: NewWeights | None) -> pb.PauseResponse:
            self._paused = True
            return pb.PauseResponse(num_requests=self._actions.num_requests())

        seconds = _seconds(request.timeout_ms)
        self._begin(_Change("pause", request.running_requests, seconds, apply, reply, refuse))

    def resume(self) -> pb.ResumeResponse:
        """Ends a pause, and a drain."""
        self._check_free()
        self._check_awake("Resume")
        self._paused = self.draining = False
        self._go_on()
        return pb.ResumeResponse()

    def sleep(self, request: pb.SleepRequest, reply: Reply, refuse: Refuse) -> None:
        """Halts and frees memory. The reply comes when that is so."""
        self._check_free()
        level = request.level or 1
        if level > 2:
            raise InvalidRequest(f"level={level} does not exist: 1 and 2 do", field="level")

        def apply(_: NewWeights | None) -> pb.SleepResponse:
            if level <= self.sleep_level:
                return pb.SleepResponse(num_requests=self._actions.num_requests(), epoch=self._actions.epoch())
            epoch = self._actions.forget_blocks()
            freed = self._actions.sleep(level)
            self.sleep_level, self._dropped = level, level > 1
            num_requests = self._actions.num_requests()
            _log.info("asleep: level %d, %d bytes free, %d requests kept", level, freed, num_requests)
            return pb.SleepResponse(num_freed_bytes=freed, num_requests=num_requests, epoch=epoch)

        kept = self.sleep_level and request.running_requests == Running.RUNNING_REQUESTS_WAIT
        running = Running.RUNNING_REQUESTS_KEEP if kept else request.running_requests
        self._begin(_Change("sleep", running, _seconds(request.timeout_ms), apply, reply, refuse))

    def wake_up(self, reply: Reply, refuse: Refuse) -> None:
        """Takes memory back, and requests too unless the worker drains."""
        self._check_free()

        if not self.sleep_level:
            reply(pb.WakeUpResponse(epoch=self._actions.epoch()))
            return

        def apply(new: NewWeights | None) -> pb.WakeUpResponse:
            self._actions.wake(new)
            self.sleep_level, self._dropped, self._paused = 0, False, False
            _log.info("awake")
            return pb.WakeUpResponse(epoch=self._actions.epoch())

        reading = _Reading(self._actions, "") if self._dropped else None
        keep = Running.RUNNING_REQUESTS_KEEP
        self._begin(_Change("wake-up", keep, _DEFAULT_SECONDS, apply, reply, refuse, reading))

    def reload(self, request: pb.ReloadWeightsRequest, reply: Reply, refuse: Refuse) -> None:
        """Reads weights, then halts and takes them."""
        self._check_free()
        self._check_awake("ReloadWeights")

        def apply(new: NewWeights | None) -> pb.ReloadWeightsResponse:
            assert new is not None, "a reload reads weights"
            self._actions.use_weights(new)
            epoch = self._actions.forget_blocks()
            num_requests = self._actions.num_requests()
            _log.info("weights reloaded from %s: epoch %d, %d requests kept", new.model, epoch, num_requests)
            return pb.ReloadWeightsResponse(digest=new.digest, epoch=epoch, num_requests=num_requests)

        reading = _Reading(self._actions, request.model)
        seconds = _seconds(request.timeout_ms)
        self._begin(_Change("reload", request.running_requests, seconds, apply, reply, refuse, reading))

    def check(self) -> None:
        """Takes a change one part further, where that can be."""
        change = self._change
        if change is None:
            return
        if change.reading is not None and not change.reading.done:
            return
        if change.reading is not None and change.reading.error is not None:
            self._end(change, change.reading.error)
        elif change.deadline is None:
            self._halt(change)
        elif self._is_quiet(change):
            self._apply(change)
        elif self._clock() >= change.deadline:
            left, seconds = self._actions.num_requests(), change.seconds
            error = DeadlineExceeded(f"{left} requests still ran {seconds:g} s after the {change.name} was asked for")
            self._end(change, error)

    def _begin(self, change: _Change) -> None:
        self._change = change
        self.check()

    def _halt(self, change: _Change) -> None:
        change.deadline = self._clock() + change.seconds
        reason = f"the worker was stopped for a {change.name}"
        self._actions.begin_drain()
        if change.running == Running.RUNNING_REQUESTS_KEEP:
            self._actions.abort_prefills(reason)
        elif change.running == Running.RUNNING_REQUESTS_WAIT:
            self._actions.freeze(False)  # those that a pause kept run to their ends too
        else:
            self._actions.abort_all(reason)
        self.check()

    def _is_quiet(self, change: _Change) -> bool:
        """Whether nothing is left to wait for; freezes those that are kept when no hand-over needs them any more."""
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
        self._go_on()
        change.reply(answer)

    def _end(self, change: _Change, error: ServiceError) -> None:
        _log.warning("the %s was given up: %s", change.name, error.message)
        self._change = None
        self._go_on()
        change.refuse(error)

    def _go_on(self) -> None:
        """As the activity says."""
        self._actions.freeze(self.stopped)
        if not self.stopped and not self.draining:
            self._actions.end_drain()

    def _check_free(self) -> None:
        if self._change is not None:
            raise Mismatch(f"a {self._change.name} is under way: ask again when it is answered")

    def _check_awake(self, method: str) -> None:
        if self.sleep_level:
            raise Mismatch(f"the worker sleeps, at level {self.sleep_level}: call WakeUp before {method}")


def _seconds(timeout_ms: int) -> float:
    return timeout_ms / 1000 if timeout_ms else _DEFAULT_SECONDS
