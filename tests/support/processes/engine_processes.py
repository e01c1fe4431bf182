"""Finds the engine processes of workers."""

from __future__ import annotations

import contextlib

import psutil

_MODULE = "baton.worker.process.main"


def engines_of(pid: int | None = None) -> list[psutil.Process]:
    """Returns the live engines among the children of a process, by default of this one, oldest first."""
    found: list[tuple[float, psutil.Process]] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
                if _MODULE in process.cmdline():
                    found.append((process.create_time(), process))
    return [process for _, process in sorted(found, key=lambda one: one[0])]


def engine_of(pid: int | None = None) -> psutil.Process:
    """Returns the only engine. Raises ValueError if there is none, or several."""
    (engine,) = engines_of(pid)
    return engine
