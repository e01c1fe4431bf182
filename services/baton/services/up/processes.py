"""Child processes with a log file each: start, end of the log, stop with everything they started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from baton.services.up.tandem import ServicePlan

_TAIL_LINES = 20
_TAIL_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Child:
    """A running service. It leads a session of its own, so that a terminal's Ctrl-C does not reach it."""

    plan: ServicePlan
    log_path: Path
    process: asyncio.subprocess.Process

    @classmethod
    async def start(cls, plan: ServicePlan, log_dir: Path, environ: Mapping[str, str]) -> Self:
        """Starts it. It ends with this process, however this one ends."""
        log_path = log_dir / f"{plan.name.replace(' ', '-')}.log"
        words = (sys.executable, "-m", "baton.services.cli", *plan.arguments, "--parent-pid", str(os.getpid()))
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**environ, **plan.variables, **plan.secrets, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        return cls(plan, log_path, process)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.returncode is None

    @property
    def ending(self) -> str:
        """Describes how it ended."""
        code = self.process.returncode
        if code is None:
            return "still runs"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"stopped with exit code {code}"

    def log_tail(self) -> str:
        """Returns the last lines of its log."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    async def stop(self, grace_seconds: float) -> bool:
        """Sends SIGTERM, and SIGKILL after the grace time. Returns False if it did not end by itself."""
        if self.running:
            self.process.terminate()
        try:
            async with asyncio.timeout(grace_seconds):
                await self.process.wait()
            return True
        except TimeoutError:
            return False
        finally:
            self.kill()
            await self.process.wait()

    def kill(self) -> None:
        """Kills it and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
