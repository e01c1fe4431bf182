"""The state of files and batches in this process's memory, for one gateway without Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.gateway.batches.state.store import AlreadyRecorded, Commit, Entry, LeaseLost, Progress, StorageFull, Use


@dataclass(slots=True)
class _Run:
    """The execution of a batch."""

    entry: Entry
    fence: int = 0
    lease_end: float = 0.0  # by the clock
    lines: set[int] = field(default_factory=set)
    parts: list[bytes] = field(default_factory=list)
    cancelled_at: float | None = None
    is_open: bool = True


class MemoryState:
    """Implements StateStore."""

    shared = False

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[tuple[str, str], bytes] = {}
        self._listed: dict[tuple[str, str], dict[str, float]] = {}  # times of creation by name
        self._expiry: dict[Entry, float] = {}
        self._runs: dict[str, _Run] = {}
        self._sizes: dict[str, dict[str, int]] = {}  # of files, by tenant and name

    async def create(self, entry: Entry, record: bytes, created: float, expires: float | None) -> None:
        self._records[entry.kind, entry.name] = record
        self._listed.setdefault((entry.kind, entry.tenant), {})[entry.name] = created
        if expires is not None:
            self._expiry[entry] = expires
        if entry.kind == "batch":
            self._runs[entry.name] = _Run(entry)

    async def create_file(self, entry: Entry, record: bytes, created: float, expires: float | None, use: Use) -> None:
        sizes = self._sizes.setdefault(entry.tenant, {})
        others = sum(sizes.values()) - sizes.get(entry.name, 0)
        if use.limit and others + use.size > use.limit:
            raise StorageFull(others)
        sizes[entry.name] = use.size
        await self.create(entry, record, created, expires)

    async def stored_bytes(self, tenant: str) -> int:
        return sum(self._sizes.get(tenant, {}).values())

    async def load(self, kind: str, names: Sequence[str]) -> list[bytes | None]:
        return [self._records.get((kind, name)) for name in names]

    async def delete(self, entry: Entry) -> bool:
        self._listed.get((entry.kind, entry.tenant), {}).pop(entry.name, None)
        self._expiry.pop(entry, None)
        self._runs.pop(entry.name, None)
        self._sizes.get(entry.tenant, {}).pop(entry.name, None)
        return self._records.pop((entry.kind, entry.name), None) is not None

    async def page(self, kind: str, tenant: str, after: str, limit: int, ascending: bool) -> list[str] | None:
        times = self._listed.get((kind, tenant), {})
        names = sorted(times, key=lambda name: (times[name], name), reverse=not ascending)
        if not after:
            return names[:limit]
        if after not in times:
            return None
        first = names.index(after) + 1
        return names[first : first + limit]

    async def expire(self, entry: Entry, when: float) -> None:
        self._expiry[entry] = when

    async def expired(self, now: float, most: int) -> list[Entry]:
        return [entry for entry, when in self._expiry.items() if when <= now][:most]

    async def open_batches(self) -> list[Entry]:
        return [run.entry for run in self._runs.values() if run.is_open]

    async def close_batch(self, entry: Entry) -> None:
        run = self._runs.get(entry.name)
        if run is not None:
            run.is_open = False
            run.lines, run.parts = set(), []

    async def lease(self, name: str, seconds: float) -> int | None:
        run, now = self._runs.get(name), self._clock()
        if run is None or run.lease_end > now:
            return None
        run.fence += 1
        run.lease_end = now + seconds
        return run.fence

    async def renew(self, name: str, fence: int, seconds: float) -> None:
        self._held(name, fence).lease_end = self._clock() + seconds

    async def release(self, name: str, fence: int) -> None:
        run = self._runs.get(name)
        if run is not None and run.fence == fence:
            run.lease_end = 0.0

    async def commit(self, name: str, fence: int, commit: Commit) -> None:
        run = self._held(name, fence)
        if not run.lines.isdisjoint(commit.lines):
            raise AlreadyRecorded(f"lines of {name} are recorded already")
        run.lines.update(commit.lines)
        run.parts.extend(commit.parts)
        self._records["batch", name] = commit.record

    async def progress(self, name: str) -> Progress:
        run = self._runs.get(name)
        if run is None:
            return Progress(b"", ())
        bitmap = bytearray((max(run.lines, default=-1) >> 3) + 1)
        for line in run.lines:
            bitmap[line >> 3] |= 0x80 >> (line & 7)
        return Progress(bytes(bitmap), tuple(run.parts))

    async def cancel(self, name: str, now: float) -> None:
        run = self._runs.get(name)
        if run is not None and run.cancelled_at is None:
            run.cancelled_at = now

    async def cancelled_at(self, names: Sequence[str]) -> list[float | None]:
        runs = map(self._runs.get, names)
        return [None if run is None else run.cancelled_at for run in runs]

    async def close(self) -> None:
        """Does nothing."""

    def _held(self, name: str, fence: int) -> _Run:
        run = self._runs.get(name)
        if run is None or run.fence != fence:
            raise LeaseLost(f"another gateway runs {name}")
        return run
