"""Probes whether the engine's process runs: it answers each byte on a thread of its own, beside the steps.

A long step, a long-held lock or an overloaded machine only delays the answer. A process that does not answer and is
stopped, according to the system, will not continue by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

_STOPPED = b"T"
_BYTES = 64


def answer_probes(sock: socket.socket) -> threading.Thread:
    """Starts a thread at the engine's end that sends back every byte, until the front is gone."""
    thread = threading.Thread(target=_answer, args=(sock,), name="liveness", daemon=True)
    thread.start()
    return thread


def _answer(sock: socket.socket) -> None:
    with sock, contextlib.suppress(OSError):
        while data := sock.recv(_BYTES):
            sock.sendall(data)


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process (Linux; False on other systems, and if the process has ended)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 :][:1] == _STOPPED


class LivenessProbe:
    """The front's end. Calls `on_stopped` once, if an answer is late by `seconds` and the process is stopped.

    Costs nothing between probes.
    """

    def __init__(self, sock: socket.socket, pid: int, seconds: float, on_stopped: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._pid = pid
        self._seconds = seconds
        self._on_stopped = on_stopped
        self._timer: asyncio.TimerHandle | None = None
        self._suspected = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._take_answer)

    def probe(self) -> None:
        """Sends a probe, unless an answer is pending."""
        if self._timer is None and self._sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._sock.send(b"\0")
            self._suspected = False
            self._timer = self._loop.call_later(self._seconds / 2, self._overdue)

    def close(self) -> None:
        """Stops probing. Idempotent."""
        self._stop_waiting()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()

    def _take_answer(self) -> None:
        try:
            data = self._sock.recv(_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._stop_waiting()
        if not data:
            self.close()

    def _overdue(self) -> None:
        """Reports the process if it was stopped at two checks in a row; a debugger may stop it for a moment."""
        self._timer = None
        stopped = is_stopped(self._pid)
        if stopped and self._suspected:
            self.close()
            self._on_stopped()
            return
        self._suspected = stopped
        self._timer = self._loop.call_later(self._seconds / 2, self._overdue)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
