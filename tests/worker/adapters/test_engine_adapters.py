"""An engine whose requests have adapters, on the simulator: an adapter changes the output, and only its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.engine.engine_harness import Rig, make_executor, make_request, prompt_of

from baton.rpc.block_hash import cache_namespace
from baton.rpc.errors import NotFound, Unsupported
from baton.worker.core import AdapterRef, FinishReason, Request
from baton.worker.engine.adapters.loads import ThreadLoads
from baton.worker.engine.adapters.pool import AdapterPool
from baton.worker.engine.engine import Engine
from baton.worker.executors.sim.adapters import SimAdapters
from baton.worker.scheduling.settings import EngineSettings

SETTINGS = EngineSettings(max_num_requests=8, max_num_batched_tokens=64)


class GatedAdapters(SimAdapters):
    """Reads wait until a test opens the gate."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, 0.0, 0.0)
        self.gate = threading.Event()
        self.gate.set()

    def read(self, path: str) -> Any:
        assert self.gate.wait(30)
        if path == "missing":
            raise NotFound(f"{path}: there is no such folder on the worker", field="lora_path")
        return super().read(path)


class AdapterRig(Rig):
    """An engine with `num_slots` slots."""

    def __init__(self, num_slots: int = 2) -> None:
        executor = make_executor(max_loras=num_slots)
        self.memory = executor.adapters = GatedAdapters(num_slots)
        self.loads = ThreadLoads()
        pool: AdapterPool[Any] = AdapterPool(self.memory, 8, self.loads, time.monotonic)
        self.pool = pool
        super().__init__(Engine(executor, SETTINGS, 1, adapters=pool), executor)

    def request(self, prompt: list[int], name: str = "", **values: Any) -> Request:
        """Returns a request as a gateway makes it: the adapter's contents are in its namespace."""
        if not name:
            return make_request(prompt, **values)
        digest = self.memory.digest(name)
        namespace = cache_namespace(bytes(16), 4, digest.hex())
        return make_request(prompt, adapter=AdapterRef(name, name, digest), cache_namespace=namespace, **values)

    def run(self, *requests: Request) -> list[list[int]]:
        """Runs requests together to their ends. Returns their tokens."""
        self.submit(*requests)
        names = [one.request_id for one in requests]
        deadline = time.monotonic() + 30
        while not all(name in self.seen.finishes or name in self.seen.failures for name in names):
            assert time.monotonic() < deadline, "the requests end"
            self.step()
        return [self.seen.tokens.get(name, []) for name in names]


@pytest.fixture
def rig() -> Iterator[AdapterRig]:
    rig = AdapterRig()
    yield rig
    rig.memory.gate.set()
    rig.loads.close()
    rig.engine.audit()


def test_outputs_depend_on_the_adapter_and_not_on_the_batch(rig: AdapterRig) -> None:
    prompt = prompt_of(21)
    alone = [rig.run(rig.request(prompt, name))[0] for name in ("", "a", "b")]
    assert len({tuple(tokens) for tokens in alone}) == 3
    together = rig.run(*(rig.request(prompt, name) for name in ("", "a", "b", "", "a", "b")))
    assert together == alone * 2


def test_more_adapters_than_slots_take_turns(rig: AdapterRig) -> None:
    names = ["a", "b", "c", "d", "e"] * 4
    alone = {name: rig.run(rig.request(prompt_of(9), name))[0] for name in set(names)}
    tokens = rig.run(*(rig.request(prompt_of(9), name) for name in names))
    assert tokens == [alone[name] for name in names]
    assert len(rig.pool.on_device()) == 2


def test_a_request_that_waits_for_its_adapter_delays_no_other(rig: AdapterRig) -> None:
    rig.memory.gate.clear()
    slow = rig.request(prompt_of(9), "a")
    rig.submit(slow)
    assert len(rig.run(rig.request(prompt_of(9, 1)))[0]) == 8
    assert slow.request_id not in rig.seen.tokens
    assert rig.engine.num_deferred == 1
    rig.memory.gate.set()
    while slow.request_id not in rig.seen.finishes:
        rig.step()


def test_a_request_may_end_while_its_adapter_is_read(rig: AdapterRig) -> None:
    rig.memory.gate.clear()
    request = rig.request(prompt_of(9), "a")
    rig.submit(request)
    rig.engine.abort(request.request_id)
    rig.step()
    assert rig.seen.finishes[request.request_id].reason is FinishReason.ABORT
    rig.memory.gate.set()
    assert len(rig.run(rig.request(prompt_of(9), "a"))[0]) == 8


def test_an_adapter_that_cannot_be_read_fails_its_request(rig: AdapterRig) -> None:
    request = rig.request(prompt_of(9), "missing")
    rig.run(request, rig.request(prompt_of(9)))
    assert isinstance(rig.seen.failures[request.request_id], NotFound)


def test_a_preempted_request_keeps_its_adapter() -> None:
    rig = AdapterRig(1)
    alone = rig.run(rig.request(prompt_of(30), "a", max_tokens=40))
    rig.engine.reset_prefix_cache()
    request = rig.request(prompt_of(30), "a", max_tokens=40)
    rig.submit(request)
    while len(rig.seen.tokens.get(request.request_id, ())) < 10:
        rig.step()
    while not rig.engine.settled:
        rig.step()
    rig.engine.recompute_all()
    while request.request_id not in rig.seen.finishes:
        rig.step()
    assert [rig.seen.tokens[request.request_id]] == alone
    rig.loads.close()


def test_an_engine_without_adapters_refuses_them() -> None:
    engine = Engine(make_executor(), SETTINGS, 1)
    with pytest.raises(Unsupported, match="without --enable-lora"):
        engine.submit(make_request(prompt_of(5), adapter=AdapterRef("a", "a", bytes(16))))
