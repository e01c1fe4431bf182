"""A process that serves an object: tests and benchmarks call its methods, and may suspend or kill it meanwhile.

`Child(factory, *arguments)` starts `python -m support.processes.child`, which creates the object and then runs one call
after the other. If the object has a method `idle`, it is called repeatedly between calls; a method `close` is called at
the end.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

_ANSWER_SECONDS = 60.0
_END_SECONDS = 30.0
_IDLE_SECONDS = 2e-4


class ChildFailed(Exception):
    """A call failed in the child, or the child ended or did not respond."""


class Child:
    """A process and the object in it."""

    def __init__(
        self, factory: Callable[..., object], *arguments: Any, environ: Mapping[str, str] | None = None, **fields: Any
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                env={**os.environ, **(environ or {}), "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
        self._name = factory.__qualname__
        self._connection = Connection(ours.detach())
        self._is_ready = False
        self._connection.send((factory, arguments, fields))

    def wait_ready(self, seconds: float = _ANSWER_SECONDS) -> None:
        """Waits until the object is created. Idempotent."""
        if not self._is_ready:
            self._is_ready = True
            self.result(seconds)

    def call(self, method: str, *arguments: Any, seconds: float = _ANSWER_SECONDS, **fields: Any) -> Any:
        """Runs a method in the child and returns its result. Raises ChildFailed."""
        self.begin(method, *arguments, **fields)
        return self.result(seconds)

    def begin(self, method: str, *arguments: Any, **fields: Any) -> None:
        """Starts a call. `result` returns the results of calls in the order of their starts."""
        self.wait_ready()
        try:
            self._connection.send((method, arguments, fields))
        except OSError as error:
            raise self._ended() from error

    def result(self, seconds: float = _ANSWER_SECONDS) -> Any:
        """Waits for the oldest started call. Kills a child that does not respond in time."""
        try:
            if not self._connection.poll(seconds):
                self.process.kill()
                raise ChildFailed(f"{self._name} did not answer within {seconds:g} s")
            succeeded, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if not succeeded:
            raise ChildFailed(f"in {self._name}: {value}")
        return value

    def close(self) -> None:
        """Ends the child. Fails if it ended with an error."""
        self._connection.close()
        assert self.process.wait(_END_SECONDS) == 0, f"{self._name} ended with {self.process.returncode}"

    def kill(self) -> None:
        """Kills the child. Idempotent, also after `close`."""
        self.process.kill()
        self.process.wait(_END_SECONDS)
        self._connection.close()

    def _ended(self) -> ChildFailed:
        return ChildFailed(f"{self._name} ended with {self.process.wait(_END_SECONDS)}")


def _serve(connection: Connection) -> None:
    """Runs calls until the other end is closed."""
    factory, arguments, fields = connection.recv()
    try:
        served = factory(*arguments, **fields)
    except Exception:
        connection.send((False, traceback.format_exc()))
        return
    connection.send((True, None))
    idle: Callable[[], None] | None = getattr(served, "idle", None)
    while True:
        while idle is not None and not connection.poll(_IDLE_SECONDS):
            idle()
        try:
            method, arguments, fields = connection.recv()
        except (EOFError, ConnectionError):
            break
        try:
            connection.send((True, getattr(served, method)(*arguments, **fields)))
        except Exception:
            connection.send((False, traceback.format_exc()))
    if (close := getattr(served, "close", None)) is not None:
        close()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
