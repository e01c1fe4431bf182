"""Which adapters are on the device: slots, eviction, order, failures. Loads end when a test says so."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from support.engine.engine_harness import Clock

from baton.rpc.errors import InvalidRequest, Mismatch, NoCapacity
from baton.worker.adapters.memory import HostAdapter
from baton.worker.core import AdapterRef
from baton.worker.engine.adapters.loads import Ended
from baton.worker.engine.adapters.pool import NO_SLOT, AdapterPool
from baton.worker.executors.sim.adapters import SimAdapters


class ManualLoads:
    """Implements Loads: each load runs when `run` is called."""

    due = None

    def __init__(self) -> None:
        self.begun: list[tuple[Any, Callable[[], Any]]] = []
        self._ended: list[Ended] = []

    def start(self, key: object, work: Callable[[], Any]) -> None:
        self.begun.append((key, work))

    def take(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        pass

    def run(self, count: int = 10**6) -> None:
        for key, work in self.begun[:count]:
            try:
                self._ended.append(Ended(key, work(), None, 0.1))
            except InvalidRequest as error:
                self._ended.append(Ended(key, None, error, 0.1))
        del self.begun[:count]


class Memory(SimAdapters):
    """Records what is in each slot, and refuses some folders."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, 0.0, 0.0, lambda seconds: None)
        self.slots: dict[int, bytes] = {}

    def read(self, path: str) -> Any:
        if path.startswith("broken"):
            raise InvalidRequest(f"{path} is broken", field="lora_path")
        return super().read(path)

    def write(self, slot: int, adapter: HostAdapter) -> None:
        self.slots[slot] = adapter.digest


class Rig:
    """A pool, and the requests that it has granted."""

    def __init__(self, num_slots: int = 2, num_host: int = 8) -> None:
        self.clock = Clock()
        self.memory = Memory(num_slots)
        self.loads = ManualLoads()
        self.pool: AdapterPool[str] = AdapterPool(self.memory, num_host, self.loads, self.clock)
        self.slots: dict[str, int] = {}
        self.errors: dict[str, Any] = {}
        self.refs: dict[str, AdapterRef] = {}
        self.step = 0

    def ref(self, name: str) -> AdapterRef:
        return AdapterRef(name, name, self.memory.digest(name))

    def want(self, owner: str, name: str) -> None:
        self.refs[owner] = self.ref(name)
        self.pool.want(owner, self.refs[owner])
        self.settle()

    def end(self, owner: str) -> None:
        self.pool.end(owner, self.refs[owner], self.step)
        self.slots.pop(owner, None)
        self.settle()

    def settle(self, collected: int | None = None) -> None:
        for granted in self.pool.settle(self.step if collected is None else collected):
            owner = granted.owner
            if granted.error is None:
                self.slots[owner] = granted.slot
                assert self.memory.slots[granted.slot] == self.refs[owner].digest, "the slot holds its adapter"
            else:
                self.errors[owner] = granted.error

    def load(self) -> None:
        """Runs all loads, and those that follow from them."""
        self.settle()
        while self.loads.begun:
            self.loads.run()
            self.settle()


def test_a_request_waits_until_its_adapter_is_read_and_copied() -> None:
    rig = Rig()
    rig.want("r1", "a")
    assert not rig.slots
    rig.loads.run(1)
    rig.settle()
    assert not rig.slots, "it is in host memory"
    rig.load()
    assert rig.slots == {"r1": rig.slots["r1"]}
    rig.want("r2", "a")
    assert rig.slots["r2"] == rig.slots["r1"], "at once"
    assert rig.pool.on_device() == ["a"]
    assert (rig.pool.stats.num_loads, rig.pool.stats.num_device_loads) == (1, 1)


def test_requests_for_one_adapter_read_it_once() -> None:
    rig = Rig()
    for number in range(5):
        rig.want(f"r{number}", "a")
    rig.load()
    assert len(rig.slots) == 5
    assert rig.pool.stats.num_loads == 1


def test_the_adapter_unused_for_longest_makes_room() -> None:
    rig = Rig()
    for owner, name in (("r1", "a"), ("r2", "b")):
        rig.want(owner, name)
        rig.load()
        rig.end(owner)
    rig.want("r3", "a")
    rig.end("r3")
    rig.want("r4", "c")
    rig.load()
    assert rig.pool.on_device() == ["a", "c"]
    rig.want("r5", "b")
    rig.load()
    assert rig.pool.stats.num_loads == 3, "b was still in host memory"


def test_an_adapter_with_requests_keeps_its_slot() -> None:
    rig = Rig(num_slots=1)
    rig.want("r1", "a")
    rig.load()
    rig.want("r2", "b")
    rig.load()
    assert "r2" not in rig.slots
    assert rig.pool.waiting() == ["b"]
    rig.end("r1")
    rig.load()
    assert rig.slots == {"r2": 0}


def test_a_slot_is_not_written_while_a_step_may_read_it() -> None:
    rig = Rig(num_slots=1)
    rig.want("r1", "a")
    rig.load()
    rig.step = 7
    rig.pool.end("r1", rig.refs["r1"], 7)
    rig.pool.want("r2", rig.ref("b"))
    rig.refs["r2"] = rig.ref("b")
    rig.settle(collected=6)
    rig.loads.run()
    rig.settle(collected=6)
    assert not rig.loads.begun
    rig.settle(collected=7)
    assert len(rig.loads.begun) == 1


def test_requests_of_adapters_on_the_device_pass_one_that_waits_for_a_slot() -> None:
    rig = Rig(num_slots=1)
    rig.want("r1", "a")
    rig.load()
    rig.want("r2", "b")
    rig.load()
    rig.want("r3", "a")
    assert "r3" in rig.slots


def test_a_request_that_waits_long_is_not_passed_for_ever() -> None:
    rig = Rig(num_slots=1)
    rig.want("r1", "a")
    rig.load()
    rig.want("r2", "b")
    rig.load()
    rig.clock.sleep(1.0)
    rig.want("r3", "a")
    assert "r3" not in rig.slots
    rig.end("r1")
    rig.load()
    assert "r2" in rig.slots
    assert "r3" not in rig.slots
    rig.end("r2")
    rig.load()
    assert "r3" in rig.slots


def test_a_folder_that_cannot_be_read_fails_its_requests_alone() -> None:
    rig = Rig()
    rig.want("r1", "broken")
    rig.want("r2", "a")
    rig.load()
    assert "is broken" in rig.errors["r1"].message
    assert list(rig.slots) == ["r2"]
    rig.end("r1")
    rig.want("r3", "broken")
    rig.load()
    assert "r3" in rig.errors, "it is read again"


def test_a_folder_with_other_contents_is_refused() -> None:
    rig = Rig()
    rig.refs["r1"] = AdapterRef("a", "a", bytes(16))
    rig.pool.want("r1", rig.refs["r1"])
    rig.load()
    assert isinstance(rig.errors["r1"], Mismatch)
    assert bytes(16).hex() in rig.errors["r1"].message


def test_host_memory_drops_what_was_unused_for_longest() -> None:
    rig = Rig(num_slots=1, num_host=2)
    for name in "abcd":
        rig.want(name, name)
        rig.load()
        rig.end(name)
    assert rig.pool.num_in_host_memory == 2
    assert rig.pool.stats.num_host_evictions == 2


@pytest.mark.parametrize("seed", range(20))
def test_every_request_gets_its_slot_whatever_happens(seed: int) -> None:
    generator = random.Random(seed)
    rig = Rig(num_slots=generator.randint(1, 3), num_host=4)
    live: list[str] = []
    for number in range(300):
        kind = generator.random()
        if kind < 0.4:
            rig.want(f"r{number}", generator.choice("abcdef"))
            live.append(f"r{number}")
        elif kind < 0.45:
            names = generator.sample("abcdef", generator.randint(0, rig.memory.num_slots - 1))
            rig.pool.pin({rig.ref(name).digest for name in names})
        elif kind < 0.7 and live:
            rig.end(live.pop(generator.randrange(len(live))))
        else:
            rig.loads.run(generator.randint(1, 3))
            rig.settle()
        rig.clock.sleep(generator.random() * 0.3)
        rig.step += 1
        assert len({rig.refs[owner].digest for owner in rig.slots}) <= rig.memory.num_slots
    while live:
        rig.load()
        granted = [owner for owner in live if owner in rig.slots]
        assert granted, "some request can always run"
        for owner in granted:
            live.remove(owner)
            rig.end(owner)
    assert NO_SLOT not in rig.slots.values()
    assert not rig.errors
    assert rig.pool.num_waiting == 0


def adopt(rig: Rig, name: str) -> bytes:
    """Reads an adapter to host memory. Returns its digest."""
    rig.pool.adopt(rig.ref(name), rig.memory.read(name))
    return rig.ref(name).digest


def test_a_pinned_adapter_is_copied_at_once_and_stays() -> None:
    rig = Rig(num_slots=2, num_host=2)
    rig.pool.pin([adopt(rig, "a")])
    rig.load()
    assert rig.pool.on_device() == ["a"]
    for name in "bcdebcde":
        rig.want(name, name)
        rig.load()
        rig.end(name)
        assert "a" in rig.pool.on_device()
    rig.want("r1", "a")
    assert "r1" in rig.slots, "at once"
    assert rig.pool.num_in_host_memory <= 2
    rig.end("r1")
    rig.pool.pin([])
    for name in "bc":
        rig.want(name, name)
        rig.load()
    assert rig.pool.on_device() == ["b", "c"]


def test_a_pinned_adapter_waits_for_a_slot_that_no_step_reads() -> None:
    rig = Rig(num_slots=2)
    for owner, name in (("r1", "a"), ("r2", "b")):
        rig.want(owner, name)
        rig.load()
    rig.pool.pin([adopt(rig, "c")])
    rig.load()
    assert rig.pool.on_device() == ["a", "b"]
    rig.step = 7
    rig.pool.end("r1", rig.refs["r1"], 7)
    rig.settle(collected=6)
    assert not rig.loads.begun
    rig.settle(collected=7)
    rig.loads.run()
    rig.settle(collected=7)
    assert rig.pool.on_device() == ["b", "c"]


def test_one_slot_is_left_for_adapters_that_are_not_pinned() -> None:
    rig = Rig(num_slots=3)
    digests = [adopt(rig, name) for name in "abc"]
    rig.pool.pin(digests[:2])
    with pytest.raises(NoCapacity, match="3 adapters are to be pinned; at most 2 of the 3 slots") as raised:
        rig.pool.pin(digests)
    assert raised.value.field == "pinned"
    assert rig.pool.num_pinned == 2, "nothing has changed"


def test_requests_are_reported_by_the_names_that_they_gave() -> None:
    rig = Rig(num_slots=1)
    for owner, name in (("r1", "a"), ("r2", "alias")):
        rig.refs[owner] = AdapterRef(name, "a", rig.memory.digest("a"))
        rig.pool.want(owner, rig.refs[owner])
    rig.load()
    rig.want("r3", "b")
    rig.load()
    assert (rig.pool.running(), rig.pool.waiting()) == (["a", "alias"], ["b"])
    rig.end("r1")
    assert rig.pool.running() == ["alias"]
