"""Profiles the engine's steps with torch, started and stopped between steps. Imports torch at the first use."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from baton.rpc.errors import InvalidRequest, Mismatch, Unsupported

_log = logging.getLogger(__name__)


class ProfilePlan(NamedTuple):
    """Which steps are recorded."""

    num_steps: int = 0  # of one profile; 0: until it is stopped
    delay_steps: int = 0  # before the first profile, and between two
    num_profiles: int = 1

    def validate(self) -> None:
        """Raises InvalidRequest for several profiles without an end."""
        if self.num_profiles > 1 and not self.num_steps:
            raise InvalidRequest(
                f"num_profiles={self.num_profiles} needs num_steps: the first profile would not end", field="num_steps"
            )


class StepProfiler:
    """One plan at a time, to its end or until it is stopped. The engine's thread uses it."""

    def __init__(self, folder: str, executor: str, count_steps: Callable[[], int]) -> None:
        self._folder = folder
        self._executor = executor
        self._count_steps = count_steps  # since the engine's start
        self._profile: Any = None  # torch.profiler.profile
        self._paths: deque[Path] = deque()  # of the profiles that have not begun
        self._path = Path()
        self._plan = ProfilePlan()
        self._first_step = 0  # of the profile that is recorded, or comes next
        self._num_steps = 0

    @property
    def recording(self) -> bool:
        """Whether steps are being recorded."""
        return self._profile is not None

    @property
    def active(self) -> bool:
        """Whether steps are being recorded, or will be."""
        return self.recording or bool(self._paths)

    def start(self, plan: ProfilePlan) -> str:
        """Records steps by a plan. Returns the path of the first trace."""
        self._check()
        plan.validate()
        folder = Path(self._folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(
                f"profile_dir={self._folder!r} cannot be written: {error.strerror}", field="profile_dir"
            ) from error
        name = f"baton-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6:06d}"
        names = [name, *(f"{name}-{number}" for number in range(2, plan.num_profiles + 1))]
        self._paths.extend(folder / f"{one}.json.gz" for one in names)
        self._plan = plan
        path = self._paths[0]
        self._first_step = self._count_steps() + plan.delay_steps
        self._begin_due()
        return str(path)

    def on_step(self) -> None:
        """Begins and ends what is due. Call after each turn of the engine while active."""
        if self.recording:
            self._num_steps = self._count_steps() - self._first_step
            if self._plan.num_steps and self._num_steps >= self._plan.num_steps:
                self._end()
                self._first_step = self._count_steps() + self._plan.delay_steps
        self._begin_due()

    def stop(self) -> tuple[str, int]:
        """Ends the plan. Returns the last profile's path and number of steps."""
        self._paths.clear()
        if self.recording:
            self._end()
        if self._path == Path():
            raise Mismatch("no profile was started, or its first step has not come: call StartProfile first")
        return str(self._path), self._num_steps

    def close(self) -> None:
        """Writes a running profile. Idempotent."""
        self._paths.clear()
        if self.recording:
            self._end()

    def _check(self) -> None:
        if self._executor == "sim":
            raise Unsupported("executor=sim computes nothing to profile; use cpu or cuda")
        if not self._folder:
            raise Mismatch("profiling is off: start the worker with --profile-dir FOLDER", field="profile_dir")
        if self.active:
            path = self._path if self.recording else self._paths[0]
            raise Mismatch(f"a profile is running already, into {path}: call StopProfile first")

    def _begin_due(self) -> None:
        if self.recording or not self._paths or self._count_steps() < self._first_step:
            return
        import torch
        from torch.profiler import ProfilerActivity, profile

        self._path = self._paths.popleft()
        self._num_steps = 0
        on_device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_device])
        self._profile.start()
        _log.info("profiling started", extra={"path": str(self._path), "num_steps": self._plan.num_steps})

    def _end(self) -> None:
        profile, self._profile = self._profile, None
        profile.stop()
        profile.export_chrome_trace(str(self._path))
        _log.info("profile written", extra={"path": str(self._path), "num_steps": self._num_steps})
