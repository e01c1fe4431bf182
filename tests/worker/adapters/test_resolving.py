"""Loads by name alone: one search and one read for all that wait, and an answer for each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from baton.rpc.errors import InternalError, NotFound, PermissionDenied, ServiceError, Unsupported
from baton.v1 import control_pb2, worker_pb2
from baton.worker.adapters.resolvers.interface import AdapterResolver, ResolverContext
from baton.worker.adapters.resolvers.resolvers import Resolvers
from baton.worker.engine.adapters.directory import AdapterDirectory, DirectorySettings
from baton.worker.engine.adapters.loads import ThreadLoads
from baton.worker.engine.adapters.pool import AdapterPool
from baton.worker.executors.sim.adapters import SimAdapters


class Known(AdapterResolver):
    """Knows the names of a table; waits for `gate` first."""

    roots: Sequence[str] = ("/found",)

    def __init__(self, folders: dict[str, str]) -> None:
        super().__init__(ResolverContext("base"))
        self.folders = folders
        self.asked: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def find(self, name: str) -> str | None:
        self.asked.append(name)
        self.gate.wait()
        if name == "team/broken":
            raise RuntimeError("the disk is on fire")
        return self.folders.get(name)


class Rig:
    """A directory with a resolver, and a load that can be watched."""

    def __init__(self, resolver: Known | None, **settings: Any) -> None:
        self.memory = SimAdapters(2, 0.0, 0.0)
        self.loads, self.searches = ThreadLoads(), ThreadLoads(num_threads=1)
        self.pool: AdapterPool[Any] = AdapterPool(self.memory, 4, self.loads, time.monotonic)
        resolvers = None if resolver is None else Resolvers({"known": resolver}, ("team/*",))
        made = DirectorySettings(folders=("/adapters",), reserved=("base",), resolvers=resolvers, **settings)
        self.directory = AdapterDirectory(self.memory, self.pool, made, searches=self.searches)

    def begin(self, name: str) -> list[Any]:
        """Returns the list that gets the answer."""
        answers: list[Any] = []
        request = control_pb2.LoadAdapterRequest(name=name, resolve=True, registered_ms=7)
        self.directory.load(request, answers.append, answers.append)
        return answers

    def wait(self, answers: list[Any]) -> Any:
        deadline = time.monotonic() + 10
        while not answers:
            assert time.monotonic() < deadline
            self.directory.check()
            self.pool.settle(0)
        return answers[0]

    def close(self) -> None:
        self.loads.close()
        self.searches.close()


Make = Callable[..., Rig]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Rig] = []

    def build(resolver: Known | None, **settings: Any) -> Rig:
        made.append(Rig(resolver, **settings))
        return made[-1]

    yield build
    for rig in made:
        rig.close()


def test_a_name_is_found_read_and_served(make: Make) -> None:
    rig = make(Known({"team/a": "/found/a"}))
    answer = rig.wait(rig.begin("team/a"))
    digest = rig.memory.digest("/found/a")
    assert (answer.adapter.name, answer.adapter.path, answer.adapter.digest) == ("team/a", "/found/a", digest)
    assert answer.adapter.registered_ms == 7
    ref = rig.directory.ref_of(worker_pb2.SubmitRequest(adapter="team/a"))
    assert ref is not None
    assert ref.digest == digest
    rig.directory.unload("team/a")
    assert not rig.directory.infos()


def test_all_that_wait_for_a_name_share_one_search_and_one_read(make: Make) -> None:
    resolver = Known({"team/a": "/found/a"})
    rig = make(resolver)
    resolver.gate.clear()
    answers = [rig.begin("team/a") for _ in range(5)]
    resolver.gate.set()
    assert all(rig.wait(one) == rig.wait(answers[0]) for one in answers)
    assert resolver.asked == ["team/a"]
    assert rig.pool.stats.num_loads == 1
    assert rig.wait(rig.begin("team/a")).adapter == answers[0][0].adapter, "it is served already"
    assert resolver.asked == ["team/a"]


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("team/none", NotFound, "no adapter is called 'team/none', says known"),
        ("team/broken", InternalError, "the disk is on fire"),
        ("team/outside", PermissionDenied, "which is outside its folders"),
    ],
)
def test_a_failed_search_is_an_answer_for_all_and_is_tried_again(
    make: Make, name: str, kind: type[ServiceError], words: str
) -> None:
    resolver = Known({"team/outside": "/etc"})
    rig = make(resolver)
    resolver.gate.clear()
    answers = [rig.begin(name) for _ in range(2)]
    resolver.gate.set()
    for one in answers:
        assert isinstance(rig.wait(one), kind)
        assert words in one[0].message
    assert isinstance(rig.wait(rig.begin(name)), kind)
    assert resolver.asked == [name, name]
    assert not rig.directory.infos()


def test_names_that_are_not_allowed_reach_no_resolver(make: Make) -> None:
    resolver = Known({"other": "/found/a"})
    rig = make(resolver)
    with pytest.raises(PermissionDenied):
        rig.begin("other")
    assert not resolver.asked
    with pytest.raises(Unsupported, match="without --lora-resolvers") as raised:
        make(None).begin("team/a")
    assert raised.value.field == "lora_name"


def test_a_resolver_that_hangs_delays_no_adapter_with_a_folder(make: Make) -> None:
    resolver = Known({"team/a": "/found/a"})
    rig = make(resolver)
    resolver.gate.clear()
    hanging = rig.begin("team/a")
    loaded: list[Any] = []
    request = control_pb2.LoadAdapterRequest(name="poet", path="/adapters/poet")
    rig.directory.load(request, loaded.append, loaded.append)
    assert rig.wait(loaded).adapter.name == "poet"
    assert not hanging
    resolver.gate.set()
    assert rig.wait(hanging).adapter.name == "team/a"


def test_requests_may_bring_adapters_from_the_resolvers_folders_alone(make: Make) -> None:
    rig = make(Known({}))
    submit = worker_pb2.SubmitRequest(adapter="team/a")
    submit.adapter_info.path, submit.adapter_info.digest = "/found/a", bytes(16)
    assert rig.directory.ref_of(submit) is not None, "as another worker resolved it"
    submit.adapter_info.path = "/elsewhere/a"
    with pytest.raises(PermissionDenied):
        rig.directory.ref_of(submit)
