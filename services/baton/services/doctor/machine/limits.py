"""Limits of the kernel and the container: open files, locked, shared and total memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.services.doctor.finding import Finding, failed, ok, unknown, warning
from baton.services.doctor.targets import Targets

_TOPIC = "limits"
_GIB = 1 << 30
_FEW_FILES = 4096
_SPARE_FILES = 512  # in addition to connections
_LITTLE_SHM = _GIB
_DOCKER_SHM = 64 << 20


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """Limits in bytes, or counts. None: unlimited or unknown."""

    open_files: int | None
    most_open_files: int | None
    locked_memory: int | None
    shared_memory: int | None  # of /dev/shm
    memory: int | None  # of the machine
    container_memory: int | None
    cores: int


def check_limits(facts: LimitFacts, targets: Targets) -> Iterator[Finding]:
    """Checks whether the limits suffice for the service."""
    yield _files(facts, targets)
    yield _locked(facts, targets)
    yield _shared(facts, targets)
    yield _memory(facts, targets)


def observe_limits() -> LimitFacts:
    """Reads this process's limits. A service that is started in the same way has the same limits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LimitFacts(
        open_files=_finite(soft),
        most_open_files=_finite(hard),
        locked_memory=_finite(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        shared_memory=_size_of("/dev/shm"),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        container_memory=_container_memory(Path("/sys/fs/cgroup")),
        cores=len(os.sched_getaffinity(0)),
    )


def _files(facts: LimitFacts, targets: Targets) -> Finding:
    needed = targets.max_connections + _SPARE_FILES if targets.max_connections else _FEW_FILES
    have = facts.open_files
    if have is None or have >= needed:
        return ok(_TOPIC, f"open files: {'unlimited' if have is None else have}")
    raised = f"ulimit -n {needed}   (systemd: LimitNOFILE={needed}; docker: --ulimit nofile={needed})"
    if facts.most_open_files is not None and facts.most_open_files < needed:
        raised += f"; the hard limit is {facts.most_open_files}"
    if targets.max_connections:
        raised += f", or --max-connections {max(1, have - _SPARE_FILES)}"
    return warning(_TOPIC, f"open files: {have}, {needed} may be needed", raised)


def _locked(facts: LimitFacts, targets: Targets) -> Finding:
    have, wants = facts.locked_memory, "rdma" in targets.transports
    if have is None:
        return ok(_TOPIC, "locked memory: unlimited")
    what = f"locked memory: {have >> 10} KiB"
    if not wants:
        return ok(_TOPIC, f"{what}; only --transports rdma needs more")
    fix = "ulimit -l unlimited   (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1; "
    return failed(_TOPIC, f"{what}; rdma pins all KV blocks", fix + "Kubernetes: the container runtime's own limit)")


def _shared(facts: LimitFacts, targets: Targets) -> Finding:
    have = facts.shared_memory
    if have is None:
        return unknown(_TOPIC, "shared memory: there is no /dev/shm")
    what = f"shared memory: {have >> 20} MiB"
    if have >= _LITTLE_SHM or targets.executor not in ("cuda", ""):
        return ok(_TOPIC, what)
    fix = "docker: --shm-size=8g; Kubernetes: an emptyDir with medium: Memory at /dev/shm"
    if targets.executor == "cuda" and have <= _DOCKER_SHM:
        return failed(_TOPIC, f"{what}: NCCL between processes of this host fails with so little", fix)
    return warning(_TOPIC, f"{what}: little for NCCL", fix)


def _memory(facts: LimitFacts, targets: Targets) -> Finding:
    sizes = [size for size in (facts.memory, facts.container_memory) if size]
    if not sizes:
        return unknown(_TOPIC, "memory: not to be found out")
    have, wanted = min(sizes), targets.host_cache_bytes
    if targets.executor == "cpu":
        wanted += targets.kv_bytes
    what = f"memory: {have / _GIB:.1f} GiB, {facts.cores} cores"
    if wanted < have:
        return ok(_TOPIC, what)
    flags = "--host-cache-gb" + (" or --kv-cache-memory" if targets.kv_bytes and targets.executor == "cpu" else "")
    return failed(_TOPIC, f"{what}; the KV caches are to have {wanted / _GIB:.1f} GiB of it", f"lower {flags}")


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _size_of(folder: str) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _container_memory(root: Path) -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() and int(text) < 1 << 60 else None
    return None
