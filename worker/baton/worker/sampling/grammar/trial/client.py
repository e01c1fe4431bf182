"""The engine's side of trials: starts the trial process, sends it constraints, cancels trials of ended requests."""

from __future__ import annotations

import json
import logging
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from baton.rpc.background import command
from baton.rpc.errors import InternalError, InvalidRequest, NoCapacity, ServiceError
from baton.worker.core import Constraint, ModelSpec
from baton.worker.sampling.grammar.compilation.wording import SIMPLER
from baton.worker.sampling.grammar.limits import GrammarLimits
from baton.worker.sampling.grammar.messages import constraint_message
from baton.worker.sampling.grammar.translation.constraint import field_of
from baton.worker.sampling.grammar.trial.framing import send_sized
from baton.worker.sampling.grammar.trial.verdict import Verdict

_log = logging.getLogger(__name__)

_START_SECONDS = 60.0
_POLL_SECONDS = 0.02  # between checks whether the request has ended
_NICE = 5  # a third of the engine's share of the CPUs, and of other services on the machine
_MODULE = "baton.worker.sampling.grammar.trial.process"


class TrialAbandoned(Exception):
    """The request ended before its trial."""


class Trials:
    """Tries constraints in a process that can be killed. Thread-safe. The process starts on first use."""

    def __init__(self, find_folder: Callable[[], Path], model: ModelSpec, limits: GrammarLimits) -> None:
        self.num_run = 0
        self.num_killed = 0  # of num_run, by a limit
        self._find_folder = find_folder
        self._model = model
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False  # the process has read the tokenizer
        self._closed = False

    def start(self) -> None:
        """Starts the process if it does not run. Does not wait until it is ready."""
        with self._lock:
            if self._control is None:
                self._start()

    def run(self, constraint: Constraint, abandoned: Callable[[], bool] = lambda: False) -> Verdict:
        """Returns the verdict, which has a problem if the constraint costs too much.

        Raises TrialAbandoned soon after `abandoned` returns True, InternalError if no process can be started,
        NoCapacity if the machine is too busy for a verdict.
        """
        with self._lock:
            self.num_run += 1
        message = constraint_message(constraint).SerializeToString()
        data = b""
        for _ in range(2):  # the process may have been killed, and is restarted
            with self._connect() as sock:
                try:
                    send_sized(sock, message)
                    data = self._receive(sock, abandoned)
                except OSError:
                    data = b""
            if data:
                break
        try:
            verdict = Verdict.decode(data)
        except (ValueError, TypeError):
            raise InternalError("the trial process ended while it compiled a grammar") from None
        return self._judged(constraint, verdict)

    def close(self) -> None:
        """Ends the process. Idempotent."""
        with self._lock:
            self._closed = True
            self._stop()

    def _connect(self) -> socket.socket:
        """Opens the socket of a new trial. Returns the engine's end."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                with self._lock:
                    try:
                        self._send(theirs)
                    except OSError:
                        self._stop()
                        self._send(theirs)
            except (OSError, ServiceError) as error:
                ours.close()
                if isinstance(error, ServiceError):
                    raise
                raise InternalError(f"the trial process takes no grammars: {error}") from error
        return ours

    def _send(self, theirs: socket.socket) -> None:
        if self._control is None:
            self._start()
        assert self._control is not None, "the process was started"
        if not self._ready:
            self._await_ready(self._control)
        socket.send_fds(self._control, [b"t"], [theirs.fileno()])

    def _start(self) -> None:
        if self._closed:
            raise InternalError("the engine ends")
        ours, theirs = socket.socketpair()
        settings = {
            "folder": str(self._find_folder()),
            "vocab_size": self._model.vocab_size,
            "eos_token_ids": list(self._model.eos_token_ids),
            "limits": asdict(self._limits),
        }
        with theirs:
            self._process = subprocess.Popen(
                command(_NICE, _MODULE, str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._control = ours
        self._ready = False
        ours.settimeout(_START_SECONDS)
        try:
            send_sized(ours, json.dumps(settings).encode())
        except OSError as error:
            self._stop()
            raise InternalError(f"the trial process took no settings: {error}") from error

    def _await_ready(self, control: socket.socket) -> None:
        try:
            self._ready = bool(control.recv(1))
        except OSError as error:
            self._stop()
            raise InternalError(f"the trial process did not start within {_START_SECONDS:g} s: {error}") from error
        if not self._ready:
            self._stop()
            raise InternalError("the trial process ended as it started")

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._control = None

    def _receive(self, sock: socket.socket, abandoned: Callable[[], bool]) -> bytes:
        """Receives until the other side closes. Closing the socket ends the trial."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        data = bytearray()
        # The trial ends itself earlier.
        until = time.monotonic() + self._limits.max_compile_seconds + _START_SECONDS
        while time.monotonic() < until:
            if abandoned():
                raise TrialAbandoned
            if poll.poll(1000 * _POLL_SECONDS):
                part = sock.recv(1 << 20)
                if not part:
                    break
                data += part
        return bytes(data)

    def _judged(self, constraint: Constraint, verdict: Verdict) -> Verdict:
        """Returns the verdict, with a problem for the limit that ended the trial."""
        limits, problem = self._limits, ""
        if verdict.failure:
            _log.error("a grammar failed in its trial: %s", verdict.failure)
            raise InternalError(f"the grammar failed ({verdict.failure.partition(':')[0]})")
        if verdict.signal:
            with self._lock:
                self.num_killed += 1
        if verdict.signal == signal.SIGALRM:
            raise NoCapacity(
                f"the constraint was not compiled within {limits.max_compile_seconds:g} s; try again later"
            )
        if verdict.signal in (signal.SIGPROF, signal.SIGXCPU):
            problem = f"it takes more than {limits.max_compile_cpu_seconds:g} s of CPU time to compile"
        elif verdict.signal:
            problem = f"it takes more than {limits.max_compile_peak_bytes >> 20} MiB of memory to compile"
        elif verdict.num_bytes > limits.max_compile_bytes:
            size = verdict.num_bytes / (1 << 20)
            problem = f"its automaton takes {size:.0f} MiB; at most {limits.max_compile_bytes >> 20} MiB are allowed"
        if not problem:
            return verdict
        return Verdict(problem=f"{field_of(constraint)}: {problem}; {SIMPLER}", cpu_seconds=verdict.cpu_seconds)


def raise_problem(constraint: Constraint, verdict: Verdict) -> None:
    """Raises InvalidRequest if the verdict has a problem."""
    if verdict.problem:
        raise InvalidRequest(verdict.problem, field=field_of(constraint))
