"""The engine processes of workers, as the machine shows them."""

from __future__ import annotations

import contextlib

import psutil

_MODULE = "baton.worker.process.main"


def engines_of(pid: int | None = None) -> list[psutil.Process]:
    """Those among a process's own children, this one's by default, oldest first. What has ended is left out."""
    found: list[tuple[float, psutil.Process]] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
                if _MODULE in process.cmdline():
                    found.append((process.create_time(), process))
    return [process for _, process in sorted(found, key=lambda one: one[0])]


def engine_of(pid: int | None = None) -> psutil.Process:
    """The only one of them. ValueError: there is none, or more."""
    (engine,) = engines_of(pid)
    return engine
