"""Which adapters are on the device and in host memory, and which requests wait for one. Knows no tensors.

An adapter with requests keeps its slot, so at most as many adapters as there are slots run in a step. The adapter that
was unused for longest makes room for another, except pinned ones, which are kept there. Requests get slots in the order
of their arrival, except that those whose adapter is there pass others, until one has waited for long: then it is next
when a slot is free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, Generic, NamedTuple, TypeVar

from baton.rpc.errors import Mismatch, NoCapacity, ServiceError
from baton.worker.adapters.memory import AdapterMemory, HostAdapter
from baton.worker.core import AdapterRef
from baton.worker.engine.adapters.loads import Ended, Loads
from baton.worker.engine.adapters.stats import AdapterStats

NO_SLOT = -1
_PATIENCE_SECONDS = 0.5  # for which requests of adapters on the device may pass one that waits for a slot
_DEVICE, _HOST, _FILES = "device", "host_memory", "files"
_SMOOTHING = 0.3  # of the measured load times

T = TypeVar("T")


class Granted(NamedTuple, Generic[T]):
    """A waiting request that can run now, or never will."""

    owner: T
    slot: int
    error: ServiceError | None = None
    since: float = 0.0  # it waited from then on
    source: str = ""  # where its adapter was then
    read_seconds: float = 0.0  # of the loads that it waited for
    copy_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Entry:
    """An adapter that is in memory, or on its way."""

    ref: AdapterRef
    host: HostAdapter | None = None  # None: it is being read
    slot: int = NO_SLOT
    written: bool = False  # its slot holds it
    users: dict[Any, str] = field(default_factory=dict)  # requests that may run, and how they named it
    free_after: int = 0  # the step after which no step reads its slot
    used: int = 0  # when it was last used, as a count of uses
    read_seconds: float = 0.0  # of its last load
    copy_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Waiter(Generic[T]):
    owner: T
    entry: _Entry
    name: str  # as the request has it
    since: float
    source: str  # where the adapter was: device, host_memory or files


@dataclass(slots=True, eq=False)
class _Read:
    """A read to host memory, and who gets its result besides requests."""

    entry: _Entry
    done: list[Callable[[HostAdapter | None, ServiceError | None], None]] = field(default_factory=list)


class AdapterPool(Generic[T]):
    """Adapters by their digests. Only the engine's thread uses it."""

    def __init__(self, memory: AdapterMemory, num_host: int, loads: Loads, clock: Callable[[], float]) -> None:
        self.stats = AdapterStats()
        self.load_seconds = 0.0  # measured: from files to the device; 0: not known yet
        self._memory = memory
        self._num_host = num_host
        self._loads = loads
        self._clock = clock
        self._entries: dict[bytes, _Entry] = {}
        self._free_slots = list(range(memory.num_slots))
        self._waiters: dict[T, _Waiter[T]] = {}  # in order of arrival
        self._reads: dict[bytes, _Read] = {}
        self._granted: list[Granted[T]] = []
        self._num_uses = 0
        self._collected = 0  # the last step that was collected
        self._pinned: frozenset[bytes] = frozenset()

    @property
    def due(self) -> float | None:
        """When `settle` must be called next. None: it need not be."""
        return self._loads.due

    @property
    def pending(self) -> bool:
        """Whether `settle` returns something now."""
        return bool(self._granted)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their adapter."""
        return len(self._waiters)

    def on_device(self) -> list[str]:
        """Returns the names of the adapters on the device, sorted."""
        return sorted({one.ref.name for one in self._entries.values() if one.written})

    @property
    def num_in_host_memory(self) -> int:
        """Adapters in host memory."""
        return sum(one.host is not None for one in self._entries.values())

    def running(self) -> list[str]:
        """Returns the names of adapters with requests that may run, sorted."""
        return sorted({name for one in self._entries.values() for name in one.users.values()})

    def waiting(self) -> list[str]:
        """Returns the names of adapters whose requests all wait, sorted."""
        return sorted({one.name for one in self._waiters.values()}.difference(self.running()))

    def resident(self) -> dict[bytes, str]:
        """Returns the adapters on the device by their digests: the names that they were loaded by."""
        return {one.ref.digest: one.ref.name for one in self._entries.values() if one.written}

    @property
    def num_slots(self) -> int:
        """Adapters that the device has room for."""
        return self._memory.num_slots

    @property
    def num_pinned(self) -> int:
        """Adapters that are kept on the device."""
        return len(self._pinned)

    # Requests.

    def want(self, owner: T, ref: AdapterRef) -> None:
        """Asks for an adapter's slot. `settle` grants it, at once if the adapter is on the device."""
        entry = self._entries.get(ref.digest)
        if entry is None:
            entry = self._begin_read(ref).entry
        source = _DEVICE if entry.written else _HOST if entry.host is not None else _FILES
        self._waiters[owner] = _Waiter(owner, entry, ref.name, self._clock(), source)
        self._assign()

    def end(self, owner: T, ref: AdapterRef, step: int) -> None:
        """Ends a request that waited or ran. `step`: the last one that was launched."""
        if self._waiters.pop(owner, None) is not None:
            self._assign()
            return
        self._granted = [one for one in self._granted if one.owner is not owner]
        entry = self._entries.get(ref.digest)
        if entry is None or owner not in entry.users:
            return  # its load failed
        del entry.users[owner]
        entry.free_after = max(entry.free_after, step)
        self._touch(entry)
        self._assign()

    def settle(self, collected: int) -> list[Granted[T]]:
        """Takes the loads that have ended. Returns the requests that can run, or failed, since the last call."""
        self._collected = max(self._collected, collected)
        for ended in self._loads.take():
            if isinstance(ended.key, _Read):
                self._read(ended.key, ended)
            else:
                self._written(ended.key, ended)
        if self._waiters or self._pinned:
            self._assign()
        granted, self._granted = self._granted, []
        return granted

    # The directory.

    def read(self, ref: AdapterRef, done: Callable[[HostAdapter | None, ServiceError | None], None]) -> None:
        """Reads an adapter to host memory, whether it is there or not, and calls `done` in `settle`.

        Its digest may be empty: whatever the folder holds.
        """
        read = _Read(_Entry(ref), [done])
        self._loads.start(read, partial(self._memory.read, ref.path))

    def adopt(self, ref: AdapterRef, adapter: HostAdapter) -> None:
        """Keeps an adapter that was read elsewhere in host memory."""
        entry = self._entries.setdefault(ref.digest, _Entry(ref))
        entry.host = entry.host or adapter
        self._touch(entry)
        self._limit_host()

    def pin(self, digests: Collection[bytes]) -> None:
        """Keeps these adapters, and no others, on the device once they are read. Raises NoCapacity for so many that no
        slot is left for others; then nothing has changed."""
        most = self._memory.num_slots - 1
        if len(digests) > most:
            raise NoCapacity(
                f"{len(digests)} adapters are to be pinned; at most {most} of the {most + 1} slots may be, so that "
                "others can be loaded: unload one, or start workers with more --max-loras",
                field="pinned",
            )
        self._pinned = frozenset(digests)
        self._assign()

    # Loads.

    def _begin_read(self, ref: AdapterRef) -> _Read:
        read = self._reads.get(ref.digest)
        if read is None:
            entry = self._entries[ref.digest] = _Entry(ref)
            read = self._reads[ref.digest] = _Read(entry)
            self._loads.start(read, partial(self._memory.read, ref.path))
        return read

    def _read(self, read: _Read, ended: Ended) -> None:
        ref, adapter, error = read.entry.ref, ended.result, ended.error
        if adapter is not None and ref.digest and adapter.digest != ref.digest:
            error = Mismatch(
                f"adapter {ref.name!r}: its folder {ref.path} has the digest {adapter.digest.hex()}, the request's is "
                f"{ref.digest.hex()}: load it again, so that all workers and gateways have the same",
                field="adapter",
            )
        if error is not None:
            self.stats.num_failed_loads += 1
            self._fail(read, error)
            return
        self.stats.num_loads += 1
        self.stats.load_seconds.observe(ended.seconds)
        self._measure(ended.seconds)
        if not ref.digest:  # the folder's contents are known now
            read.entry.ref = ref._replace(digest=adapter.digest)
        self._reads.pop(adapter.digest, None)
        entry = self._entries.setdefault(adapter.digest, read.entry)
        entry.host = entry.host or adapter
        entry.read_seconds = ended.seconds
        self._touch(entry)
        self._limit_host()
        for done in read.done:
            done(adapter, None)

    def _fail(self, read: _Read, error: ServiceError) -> None:
        entry = read.entry
        self._reads.pop(entry.ref.digest, None)
        if self._entries.get(entry.ref.digest) is entry and entry.host is None:
            del self._entries[entry.ref.digest]
        for waiter in [one for one in self._waiters.values() if one.entry is entry]:
            del self._waiters[waiter.owner]
            self._granted.append(Granted(waiter.owner, NO_SLOT, error))
        for done in read.done:
            done(None, error)

    def _written(self, entry: _Entry, ended: Ended) -> None:
        if ended.error is not None:  # the device has no memory left, or is lost
            self._free_slots.append(entry.slot)
            entry.slot = NO_SLOT
            entry.host = None
            self._fail(_Read(entry), ended.error)
            return
        entry.written, entry.copy_seconds = True, ended.seconds
        self.stats.num_device_loads += 1
        self._touch(entry)

    def _measure(self, seconds: float) -> None:
        old = self.load_seconds
        self.load_seconds = seconds if not old else old + _SMOOTHING * (seconds - old)

    # Slots.

    def _assign(self) -> None:
        """Grants slots to waiting requests, in their order, and starts copies to slots that are free."""
        now, holds = self._clock(), False
        for waiter in list(self._waiters.values()):
            entry = waiter.entry
            if entry.written and not holds:
                self._grant(waiter, now)
            elif entry.slot == NO_SLOT and entry.host is not None:
                waits_long = now - waiter.since > _PATIENCE_SECONDS
                if not self._begin_write(entry, self._before(waiter) if waits_long else None):
                    holds = holds or waits_long
        for digest in self._pinned:
            pinned = self._entries.get(digest)
            if pinned is not None and pinned.slot == NO_SLOT and pinned.host is not None:
                self._begin_write(pinned)

    def _grant(self, waiter: _Waiter[T], now: float) -> None:
        del self._waiters[waiter.owner]
        waiter.entry.users[waiter.owner] = waiter.name
        self._touch(waiter.entry)
        self.stats.wait_seconds.observe(now - waiter.since)
        self._granted.append(
            Granted(
                waiter.owner,
                waiter.entry.slot,
                since=waiter.since,
                source=waiter.source,
                read_seconds=waiter.entry.read_seconds if waiter.source == _FILES else 0.0,
                copy_seconds=waiter.entry.copy_seconds if waiter.source != _DEVICE else 0.0,
            )
        )

    def _before(self, waiter: _Waiter[T]) -> list[_Waiter[T]]:
        """Returns the requests that came before one that waits long: it goes before those that came after it."""
        return list(takewhile(lambda one: one is not waiter, self._waiters.values()))

    def _begin_write(self, entry: _Entry, before: Sequence[_Waiter[T]] | None = None) -> bool:
        """Starts to copy an adapter to a slot that no step reads. Returns False if there is none.

        `before`: the waiting requests whose adapters make no room for it; None: all.
        """
        if not self._free_slots and not self._evict_from_device(before):
            return False
        assert entry.host is not None
        entry.slot, entry.written = self._free_slots.pop(), False
        self._loads.start(entry, partial(self._memory.write, entry.slot, entry.host))
        return True

    def _evict_from_device(self, before: Sequence[_Waiter[T]] | None) -> bool:
        """Makes room on the device. Returns False if every adapter there is used, wanted or pinned."""
        unused = [one for one in self._unused(before) if one.written and one.free_after <= self._collected]
        if not unused:
            return False
        oldest = min(unused, key=lambda one: one.used)
        self._free_slots.append(oldest.slot)
        oldest.slot, oldest.written = NO_SLOT, False
        self.stats.num_device_evictions += 1
        self._limit_host()
        return True

    def _limit_host(self) -> None:
        """Drops the adapters that were unused for longest from host memory, if it holds too many."""
        surplus = self.num_in_host_memory - self._num_host
        droppable = [one for one in self._unused() if one.host is not None and one.slot == NO_SLOT]
        for entry in sorted(droppable, key=lambda one: one.used)[: max(0, surplus)]:
            del self._entries[entry.ref.digest]
            self.stats.num_host_evictions += 1

    def _unused(self, waiters: Iterable[_Waiter[T]] | None = None) -> Iterator[_Entry]:
        """Yields adapters that are not pinned, no request runs with, and none of these waits for. None: no request."""
        wanted = {id(waiter.entry) for waiter in (self._waiters.values() if waiters is None else waiters)}
        return (
            one
            for one in self._entries.values()
            if not one.users and id(one) not in wanted and one.ref.digest not in self._pinned
        )

    def _touch(self, entry: _Entry) -> None:
        self._num_uses += 1
        entry.used = self._num_uses
