"""The resources of this machine that the process may use, within its container's limits."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Returns the number of cores by affinity and by the container's quota, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, -(-int(quota) // int(period)))
    return max(1, cores)


def usable_memory(cgroup: Path = _CGROUP) -> int:
    """Returns the bytes of memory, at most the container's limit."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read(cgroup / "memory.max")
    return min(memory, int(limit)) if limit.isdigit() else memory


def _read(path: Path) -> str:
    """Returns the text of a limit; empty without cgroup v2, "max" for no limit."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
