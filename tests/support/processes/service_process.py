"""A process of `baton SERVICE` for tests and benchmarks: its start, its log, and its end with its descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.processes.child_environment import child_environment

ROOT = Path(__file__).resolve().parents[3]

STOP_SECONDS = 15.0


class ServiceProcess:
    """A process in a new session, which ends with this process. Subclasses define its arguments and variables."""

    log_path: Path
    process: subprocess.Popen[bytes] | None

    def arguments(self) -> Sequence[str]:
        """Returns the arguments of `baton`."""
        raise NotImplementedError

    def variables(self) -> Mapping[str, str]:
        """Returns its additional environment variables."""
        raise NotImplementedError

    def spawn(self) -> None:
        """Starts the process without waiting."""
        words = [sys.executable, "-m", "baton.services.cli", *self.arguments(), "--parent-pid", str(os.getpid())]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=ROOT,
                env=child_environment(self.variables()),
            )  # fmt: skip

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its descendants."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def stop_by_force(self) -> None:
        """Terminates the process, then kills all remaining processes of its session."""
        if self.process is None:
            return
        self.signal(signal.SIGCONT)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        self.signal(signal.SIGKILL)
        self.process.wait(STOP_SECONDS)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log().splitlines()[-lines:])
