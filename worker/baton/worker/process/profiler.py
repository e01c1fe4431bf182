"""Profiles the engine's steps with torch, started and stopped between steps. Imports torch at the first use."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.rpc.errors import InvalidRequest, Mismatch, Unsupported

_log = logging.getLogger(__name__)


class StepProfiler:
    """One profile at a time, of a number of steps or until it is stopped. The engine's thread uses it."""

    def __init__(self, folder: str, executor: str, count_steps: Callable[[], int]) -> None:
        self._folder = folder
        self._executor = executor
        self._count_steps = count_steps  # since the engine's start
        self._profile: Any = None  # torch.profiler.profile
        self._path = Path()
        self._wanted = 0
        self._first_step = 0
        self._num_steps = 0

    @property
    def active(self) -> bool:
        """Whether steps are being recorded."""
        return self._profile is not None

    def start(self, num_steps: int) -> str:
        """Records `num_steps` steps from now on; 0: until `stop`. Returns the path of the trace."""
        self._check()
        import torch
        from torch.profiler import ProfilerActivity, profile

        folder = Path(self._folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(
                f"profile_dir={self._folder!r} cannot be written: {error.strerror}", field="profile_dir"
            ) from error
        self._path = folder / f"baton-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6:06d}.json.gz"
        on_device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_device])
        self._profile.start()
        self._wanted = num_steps
        self._first_step, self._num_steps = self._count_steps(), 0
        _log.info("profiling started", extra={"path": str(self._path), "num_steps": num_steps})
        return str(self._path)

    def on_step(self) -> None:
        """Ends a complete profile. Call after each turn of the engine while active."""
        self._num_steps = self._count_steps() - self._first_step
        if self._wanted and self._num_steps >= self._wanted:
            self._end()

    def stop(self) -> tuple[str, int]:
        """Ends a running profile. Returns the last profile's path and number of steps."""
        if self.active:
            self._end()
        if self._path == Path():
            raise Mismatch("no profile was started: call StartProfile first")
        return str(self._path), self._num_steps

    def close(self) -> None:
        """Writes a running profile. Idempotent."""
        if self.active:
            self._end()

    def _check(self) -> None:
        if self._executor == "sim":
            raise Unsupported("executor=sim computes nothing to profile; use cpu or cuda")
        if not self._folder:
            raise Mismatch("profiling is off: start the worker with --profile-dir FOLDER", field="profile_dir")
        if self.active:
            raise Mismatch(f"a profile is running already, into {self._path}: call StopProfile first")

    def _end(self) -> None:
        profile, self._profile = self._profile, None
        profile.stop()
        profile.export_chrome_trace(str(self._path))
        _log.info("profile written", extra={"path": str(self._path), "num_steps": self._num_steps})
