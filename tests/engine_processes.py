"""The engine processes of workers, as the machine shows them."""

from __future__ import annotations

import contextlib
import os

import psutil

_MODULE = "baton.worker.engine_process"


def engines_of(pid: int = 0) -> list[psutil.Process]:
    """Those that a process started itself, or this one, oldest first. One that has ended is none, waited for or not."""
    found: list[tuple[float, psutil.Process]] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid or os.getpid()).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
                if _MODULE in process.cmdline():
                    found.append((process.create_time(), process))
    return [process for _, process in sorted(found, key=lambda one: one[0])]


def engine_of(pid: int = 0) -> psutil.Process:
    """The only one."""
    (engine,) = engines_of(pid)
    return engine
