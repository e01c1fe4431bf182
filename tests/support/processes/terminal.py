"""Runs commands on a pseudo-terminal, reads their output, and presses keys."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

BATON = (sys.executable, "-m", "baton.services.cli")
ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>78]")


# Tests that run in the background of a shell ignore Ctrl-C, and so would their children.
_WITH_INTERRUPTS = ("env", "--default-signal=INT")


class Terminal:
    """A command of `baton`, or another program, on a new terminal."""

    def __init__(self, *words: str, environ: Mapping[str, str], program: Sequence[str] = BATON) -> None:
        own, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*_WITH_INTERRUPTS, *program, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            env={**os.environ, **environ},
            start_new_session=True,
        )
        os.close(theirs)
        self._own = own
        self.seen = b""

    def until(self, text: str, seconds: float = 30.0) -> None:
        """Waits until a text is in the output."""
        deadline = time.monotonic() + seconds
        while text.encode() not in ESCAPES.sub(b"", self.seen):
            assert time.monotonic() < deadline, (text, self.seen[-3000:])
            assert self._read(deadline - time.monotonic()), (text, self.seen[-3000:])

    def until_longer(self, size: int, seconds: float = 30.0) -> None:
        """Waits until the output has more than `size` bytes."""
        deadline = time.monotonic() + seconds
        while len(self.seen) <= size:
            assert self._read(deadline - time.monotonic()), self.seen[-3000:]

    def press(self, key: str) -> None:
        self.seen = b""
        os.write(self._own, key.encode())

    def end(self) -> int:
        """Waits for the end. Returns the exit code."""
        deadline = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.2)
        return self.process.wait(1)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        os.close(self._own)

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._own], [], [], max(0.0, seconds))
        with suppress(OSError):
            if ready:
                self.seen += os.read(self._own, 1 << 16)
                return True
        return False
