"""A process that does work for the gateway which would block its interpreter. Knows no work."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from baton.gateway.helpers.frames import send_frame
from baton.gateway.memory import return_large_blocks
from baton.rpc.background import command

_log = logging.getLogger(__name__)

_NICE = 10  # a tenth of the share of the gateway's event loop, and of other services on the machine
_READY = b"r"
_PAUSE_SECONDS = 10.0  # after a start that failed


class HelperProcess:
    """Starts `python -m module FD` for the first connection, and again after it ended. `connection` is for one thread.

    `does` names its work in logs. `seconds` without a byte, after which it counts as hung. `setup` is its first frame.
    """

    def __init__(self, module: str, does: str, seconds: int, setup: bytes | None = None) -> None:
        self._module = module
        self._does = does
        self._seconds = seconds
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready = False
        self._closed = False
        self._not_before = 0.0  # monotonic time of the next start
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Returns the running process's id, or None."""
        return None if self._process is None else self._process.pid

    def connection(self) -> socket.socket | None:
        """Returns the connection to the process, or None until it is ready. Never waits for its start."""
        with self._lock:
            if self._socket is None and not self._closed and time.monotonic() >= self._not_before:
                self._start()
            sock = self._socket
        if sock is None or self._ready:
            return sock
        try:
            self._ready = bool(sock.recv(1, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return None
        except OSError:
            self._ready = False
        if not self._ready:
            _log.warning("the process that %s ended during its start", self._does)
            self._not_before = time.monotonic() + _PAUSE_SECONDS
            self.stop()
        return self._socket

    def failed(self, error: Exception) -> None:
        """Ends a process whose connection failed; the next connection starts another."""
        _log.warning("restarting the process that %s, which ended or hangs: %s", self._does, error)
        self.stop()

    def stop(self) -> None:
        """Ends the process."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self._process = self._socket = None
            self._ready = False

    def close(self) -> None:
        """Ends the process for good. Idempotent."""
        with self._lock:
            self._closed = True
        self.stop()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command(_NICE, self._module, str(theirs.fileno())),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                _log.warning("cannot start the process that %s: %s", self._does, error)
                return
        # The socket's own timeout: Python's would wait in many small steps.
        seconds = struct.pack("ll", self._seconds, 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        if self._setup is not None:
            with contextlib.suppress(OSError):  # it has ended: the next read says so
                send_frame(ours, self._setup)
        self._socket = ours


@contextlib.contextmanager
def serving_gateway(argv: Sequence[str]) -> Iterator[tuple[socket.socket, Callable[[], None]]]:
    """Prepares a helper process. Yields its socket, and what it calls once it is ready. Ends with the gateway."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return_large_blocks()
    with socket.socket(fileno=int(argv[0])) as sock, contextlib.suppress(EOFError, ConnectionError):
        yield sock, lambda: sock.sendall(_READY)
