"""The front's client of the engine: starts it, calls it, and detects its end at once. Knows no gRPC service."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict

from google.rpc import status_pb2

from baton.rpc.errors import DeadlineExceeded, InternalError, ServiceError, Unavailable, error_from_detail
from baton.v1 import types_pb2
from baton.worker.config import WorkerConfig
from baton.worker.executors.host.compute_threads import thread_waits
from baton.worker.front.step_watchdog import StepWatchdog, cpu_seconds_of, no_cpu_seconds
from baton.worker.link.ends import FrontEnd
from baton.worker.link.frames import Frame, FrontLink, Kind
from baton.worker.link.inbox import Inbox
from baton.worker.link.liveness import LivenessProbe
from baton.worker.link.local import LocalEngineEnd, LocalLink
from baton.worker.link.step_status import StepStatus

_log = logging.getLogger(__name__)

_EXIT_SECONDS = 5.0
_CHECKS_PER_STEP_TIMEOUT = 4
_IDLE_KINDS = (Kind.STATE, Kind.LOG, Kind.READY)  # sent by an idle engine, too

Handler = Callable[[int, bytes], None]  # channel, payload


class EngineClient:
    """One engine. `ready` is set when it accepts requests; `ended` when it is gone, with the reason in `end`.

    `pace_seconds`: how long outputs of an engine that is a thread of this process wait for each other.
    """

    def __init__(self, config: WorkerConfig, pace_seconds: float = 0.0) -> None:
        self._config = config
        self._pace_seconds = pace_seconds
        self._handlers: dict[int, Handler] = {
            Kind.READY: lambda channel, payload: self.ready.set(),
            Kind.FAILED: self._on_failed,
            Kind.REPLY: self._on_reply,
            Kind.REFUSAL: self._on_refusal,
            Kind.LOG: _on_log,
        }
        self._lost_hooks: list[Callable[[ServiceError], None]] = []
        self._stall_hooks: list[Callable[[bool], None]] = []
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._call_ids = itertools.count(1)
        self._failure: ServiceError | None = None  # reported by the engine, or detected by the watchdog
        self._num_frames = 0
        self._num_peer_messages = 0
        self._link: FrontEnd | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._thread_ended: asyncio.Event | None = None
        self._liveness: LivenessProbe | None = None
        self._watch: StepWatchdog | None = None
        self.num_stalls = 0  # of the device
        self.inbox = Inbox()  # of an engine that is a thread of this process
        self._finishing: asyncio.Task[None] | None = None
        self.end: ServiceError | None = None
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()

    async def start(self, worker_id: str, advertised_host: str) -> None:
        """Starts the engine, which then loads its model."""
        if self._config.engine_process:
            ours, theirs = socket.socketpair()
            self._link = await FrontLink.connect(ours, self._on_frame, self._on_link_closed)
            await self._spawn(theirs)
        else:
            link = LocalLink(self._on_frame, self._on_link_closed, self._pace_seconds)
            self._link = link.front
            self._run_thread(link.engine)
        start = {
            "config": asdict(self._config),
            "worker_id": worker_id,
            "advertised_host": advertised_host,
            "log_level": logging.getLogger().getEffectiveLevel(),
        }
        self.send(Kind.START, payload=json.dumps(start).encode())

    async def stop(self) -> None:
        """Ends the engine and waits until it has ended. Idempotent."""
        if self._link is not None:
            self.send(Kind.STOP)
            self._link.close()
            if not self.ready.is_set():
                self._kill()  # it may load a model for minutes, and has no requests
            await self.ended.wait()

    @property
    def is_ready(self) -> bool:
        """Whether requests can be sent."""
        return self.ready.is_set() and self.end is None

    @property
    def stalled(self) -> bool:
        """Whether a step takes far longer than such steps took before. The device may recover."""
        return self._watch is not None and self._watch.stalled and self.end is None

    @property
    def progress(self) -> int:
        """A number that grows with each step of the engine, and with each message to a prefill worker.

        A prefill worker renews its leases only while its own engine makes progress.
        """
        return self._num_peer_messages + (self._watch.progress if self._watch is not None else 0)

    def on(self, kind: Kind, handler: Handler) -> None:
        """Calls `handler` for every frame of a kind."""
        self._handlers[kind] = handler

    def on_lost(self, hook: Callable[[ServiceError], None]) -> None:
        """Calls `hook` at once when the engine is gone."""
        self._lost_hooks.append(hook)

    def on_stall(self, hook: Callable[[bool], None]) -> None:
        """Calls `hook` with True when the device stalls, and with False when it recovers."""
        self._stall_hooks.append(hook)

    def send(self, kind: Kind, channel: int = 0, payload: bytes = b"") -> None:
        """Queues a frame for the engine."""
        self._num_peer_messages += kind is Kind.PEER
        if self._link is not None:
            self._link.send(kind, channel, payload)
        if self._watch is not None:
            self._watch.wake()

    async def writable(self) -> None:
        """Returns once the engine has received most of what was sent."""
        if self._link is not None:
            await self._link.writable()

    def probe(self) -> None:
        """Checks whether the engine still runs, for a peer that receives nothing. Ends a stopped engine."""
        if self._liveness is not None and self.is_ready:
            self._liveness.probe()

    async def call(self, method: int, request: bytes = b"", timeout: float = 10.0) -> bytes:
        """Calls the engine, which answers between two steps. Raises ServiceError."""
        if self.end is not None:
            raise self.end.with_traceback(None)  # without the old traceback, which would grow with each call
        if not self.ready.is_set():
            raise Unavailable("the worker is starting")
        channel = next(self._call_ids)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[channel] = answer
        self.send(Kind.CALL, channel, bytes([method]) + request)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise DeadlineExceeded(f"the engine did not answer in {timeout:g} s; it may be in a long step") from None
        finally:
            del self._calls[channel]

    async def watch(self) -> None:
        """Ends an engine without a sign of life for step_timeout. Runs until the engine has ended."""
        if not self._config.step_timeout:
            await self.ended.wait()
            return
        silent_checks, seen = 0, -1
        while not self.ended.is_set():
            # Counts checks, not seconds: after a suspension of the front itself, the engine must not be blamed.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.step_timeout / _CHECKS_PER_STEP_TIMEOUT):
                    await self.ended.wait()
            silent_checks = silent_checks + 1 if seen == self._num_frames else 0
            seen = self._num_frames
            if silent_checks >= _CHECKS_PER_STEP_TIMEOUT and self.ready.is_set():
                self._give_up(f"no sign of life for {self._config.step_timeout:g} s")
                await self.ended.wait()

    def _give_up(self, why: str) -> None:
        self._failure = InternalError(f"the engine hung: {why}; it was ended")
        self._kill()
        if self._link is not None:
            self._link.close()

    async def _spawn(self, theirs: socket.socket) -> None:
        liveness, their_liveness = socket.socketpair()
        status_file = StepStatus.new_file()
        descriptors = (theirs.fileno(), their_liveness.fileno(), status_file)
        words = (sys.executable, "-m", "baton.worker.process.main", *map(str, (*descriptors, os.getpid())))
        # A stream that waits for a peer must not share a hardware queue with the steps; the default is 8 queues.
        environment = {**thread_waits(os.environ), "CUDA_DEVICE_MAX_CONNECTIONS": "32", **os.environ}
        with theirs, their_liveness:
            self._process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, pass_fds=descriptors, env=environment
            )
        on_host = self._config.executor != "cuda"
        self._watch = StepWatchdog(
            StepStatus.at(status_file),
            self._on_stall_change,
            cpu_seconds_of(self._process.pid) if on_host else no_cpu_seconds,
        )
        os.close(status_file)
        silence = self._config.engine_silence_ms
        if silence:
            self._liveness = LivenessProbe(
                liveness,
                self._process.pid,
                silence / 1000,
                lambda: self._give_up(f"it is stopped, silent for {silence} ms"),
            )
        else:
            liveness.close()
        _log.debug("engine process started", extra={"engine_pid": self._process.pid})

    def _run_thread(self, theirs: LocalEngineEnd) -> None:
        from baton.worker.process.main import run_engine

        step_status = StepStatus()
        self._watch = StepWatchdog(step_status, self._on_stall_change)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self._thread_ended = ended

        def run() -> None:
            try:
                run_engine(theirs, step_status, inbox=self.inbox)
            finally:
                with contextlib.suppress(RuntimeError):  # the loop is closed if the thread took too long to end
                    loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=run, name="engine", daemon=True).start()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _reap(self) -> str:
        """Waits for the engine's exit. Returns how it ended."""
        if self._thread_ended is not None:
            # No thread joins it: an exiting interpreter starts none, and ends the engine after its thread pools.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._thread_ended.wait(), _EXIT_SECONDS)
            return "its thread ended" if self._thread_ended.is_set() else "its thread does not end"
        if self._process is None:
            return "it was never started"
        try:
            async with asyncio.timeout(_EXIT_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            _log.warning("the engine process did not end within %g s; killing it", _EXIT_SECONDS)
            self._kill()
            code = await self._process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _on_frame(self, frame: Frame) -> None:
        self._num_frames += 1
        if self._watch is not None and frame.kind not in _IDLE_KINDS:
            self._watch.wake()
        handler = self._handlers.get(frame.kind)
        if handler is None:
            _log.error("a frame of kind %d from the engine has no handler; dropped", frame.kind)
            return
        handler(frame.channel, frame.payload)

    def _on_stall_change(self, stalled: bool) -> None:
        self.num_stalls += stalled
        if stalled:
            _log.warning("the device is stalled: a step takes far longer than usual; gateways may move requests")
        else:
            _log.warning("the device has recovered")
        for hook in self._stall_hooks:
            hook(stalled)

    def _on_link_closed(self) -> None:
        if self._finishing is None:
            self._finishing = asyncio.get_running_loop().create_task(self._finish())

    async def _finish(self) -> None:
        if self._liveness is not None:
            self._liveness.close()
        if self._watch is not None:
            self._watch.close()
        # Ends streams before the exit code is known: gateways must move on at once.
        self._lose(Unavailable("the worker's engine ended"))
        how = await self._reap()
        self.end = self._failure or InternalError(f"the engine ended: {how}")
        _log.debug("the engine is gone: %s", how)
        self.ended.set()

    def _lose(self, error: ServiceError) -> None:
        self.end = error
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
        for hook in self._lost_hooks:
            hook(error)

    def _on_failed(self, channel: int, payload: bytes) -> None:
        self._failure = error_of_status(payload)

    def _on_reply(self, channel: int, payload: bytes) -> None:
        answer = self._calls.get(channel)
        if answer is not None and not answer.done():
            answer.set_result(payload)

    def _on_refusal(self, channel: int, payload: bytes) -> None:
        answer = self._calls.get(channel)
        if answer is not None and not answer.done():
            answer.set_exception(error_of_status(payload))


def error_of_status(serialized: bytes) -> ServiceError:
    """Returns the error that a google.rpc.Status describes."""
    status = status_pb2.Status.FromString(serialized)
    detail = types_pb2.ErrorDetail()
    for packed in status.details:
        packed.Unpack(detail)
    return error_from_detail(status.code, status.message, detail)


def _on_log(channel: int, payload: bytes) -> None:
    record = logging.makeLogRecord(json.loads(payload))
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
