"""Parses large bodies in a separate process. Knows no routes."""

from __future__ import annotations

import logging
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence

from msgspec import Struct, msgpack

from baton.gateway.bodies.reading import Reading, Task, receive_frame, send_frame, send_value

_log = logging.getLogger(__name__)

REMOTE_BYTES = 256 << 10  # parsing less blocks the interpreter for at most a millisecond
_MODULE = "baton.gateway.bodies.reading_process"
_ANSWER_SECONDS = 10  # without a byte, after which the process counts as hung


class RemoteReader:
    """Starts the process for the first large body, and again after it ended. `read` is for one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready = False
        self._closed = False
        self._lock = threading.Lock()

    def read(self, kind: type[Struct], strict: bool, pieces: Sequence[bytes | bytearray]) -> Reading | None:
        """Returns the process's result, or None if the caller must parse the body. Never waits for the process's start.

        Leaves bodies of up to REMOTE_BYTES to the caller.
        """
        if sum(map(len, pieces)) <= REMOTE_BYTES:
            return None
        sock = self._connection()
        if sock is None:
            return None
        try:
            send_value(sock, Task(kind.__module__, kind.__qualname__, strict))
            send_frame(sock, *pieces)
            reading = msgpack.decode(receive_frame(sock), type=Reading)
        except (OSError, EOFError) as error:
            _log.warning("restarting the process that reads large bodies, which ended or hangs: %s", error)
            self._stop()
            return None
        return reading if reading.representable else None

    def close(self) -> None:
        """Ends the process. Idempotent."""
        with self._lock:
            self._closed = True
        self._stop()

    def _connection(self) -> socket.socket | None:
        """Returns the connection to the process, or None until it is ready."""
        with self._lock:
            if self._socket is None and not self._closed:
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
            _log.warning("the process that reads large bodies ended during its start")
            self._stop()
        return self._socket

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    (sys.executable, "-m", _MODULE, str(theirs.fileno())),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            except OSError as error:
                ours.close()
                _log.warning("cannot start the process that reads large bodies: %s", error)
                return
        # The socket's own timeout: Python's would wait in many small steps.
        seconds = struct.pack("ll", _ANSWER_SECONDS, 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        self._socket = ours

    def _stop(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self._process = self._socket = None
            self._ready = False
