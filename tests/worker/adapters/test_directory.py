"""The adapters that requests may name: from the start, loaded at run time, and found in a folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.rpc.errors import (
    AlreadyExists,
    InvalidRequest,
    Mismatch,
    NoCapacity,
    NotFound,
    PermissionDenied,
    ServiceError,
)
from baton.v1 import control_pb2, types_pb2, worker_pb2
from baton.worker.core import AdapterRef
from baton.worker.engine.adapters.directory import AdapterDirectory, DirectorySettings
from baton.worker.engine.adapters.loads import ThreadLoads
from baton.worker.engine.adapters.pool import AdapterPool
from baton.worker.executors.sim.adapters import SimAdapters


class Rig:
    """A directory over simulated adapters, whose digests are those of their paths."""

    def __init__(self, **settings: Any) -> None:
        self.memory = SimAdapters(2, 0.0, 0.0)
        self.loads = ThreadLoads()
        self.pool: AdapterPool[Any] = AdapterPool(self.memory, 4, self.loads, time.monotonic)
        self.changes = 0
        made = DirectorySettings(**{"folders": ("/adapters",), "reserved": ("base",), **settings})
        self.directory = AdapterDirectory(self.memory, self.pool, made, changed=self._changed)

    def load(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> Any:
        """Returns the answer. Raises the refusal."""
        answers: list[Any] = []
        request = control_pb2.LoadAdapterRequest(name=name, path=path, replace=replace, pinned=pinned)
        self.directory.load(request, answers.append, answers.append)
        while not answers:
            self.pool.settle(0)
        if isinstance(answers[0], ServiceError):
            raise answers[0]
        return answers[0]

    @property
    def names(self) -> list[str]:
        return [info.name for info in self.directory.infos()]

    def close(self) -> None:
        self.directory.close()
        self.loads.close()

    def _changed(self) -> None:
        self.changes += 1


Make = Callable[..., Rig]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Rig] = []

    def build(**settings: Any) -> Rig:
        made.append(Rig(**settings))
        return made[-1]

    yield build
    for rig in made:
        rig.close()


def submit(**fields: Any) -> worker_pb2.SubmitRequest:
    return worker_pb2.SubmitRequest(**fields)


def test_an_adapter_is_served_once_it_is_read(make: Make) -> None:
    rig = make()
    answer = rig.load("a", "/adapters/a")
    assert answer.adapter.digest == rig.memory.digest("/adapters/a")
    assert (rig.names, rig.changes) == (["a"], 1)
    ref = rig.directory.ref_of(submit(adapter="a"))
    assert ref is not None
    assert (ref.name, ref.path, ref.digest) == ("a", "/adapters/a", answer.adapter.digest)
    assert rig.pool.num_in_host_memory == 1
    rig.directory.unload("a")
    assert rig.names == []
    with pytest.raises(NotFound, match="no adapter is called 'a'"):
        rig.directory.unload("a")


def test_a_name_in_use_is_refused_unless_it_is_replaced(make: Make) -> None:
    rig = make()
    first = rig.load("a", "/adapters/a")
    assert rig.load("a", "/adapters/a").adapter == first.adapter, "the same again"
    with pytest.raises(AlreadyExists, match="replace it"):
        rig.load("a", "/adapters/b")
    second = rig.load("a", "/adapters/b", replace=True)
    assert second.adapter.digest != first.adapter.digest
    assert [info.path for info in rig.directory.infos()] == ["/adapters/b"]


@pytest.mark.parametrize(
    ("name", "path", "kind", "field"),
    [
        ("a", "/elsewhere/a", PermissionDenied, "lora_path"),
        ("a", "/adapters/../etc", PermissionDenied, "lora_path"),
        ("a", "", InvalidRequest, "lora_path"),
        ("", "/adapters/a", InvalidRequest, "lora_name"),
        ("a\n", "/adapters/a", InvalidRequest, "lora_name"),
        ("x" * 300, "/adapters/a", InvalidRequest, "lora_name"),
        ("base", "/adapters/a", AlreadyExists, "lora_name"),
        ("static", "/adapters/a", AlreadyExists, "lora_name"),
    ],
)
def test_wrong_requests_are_refused_by_field(
    make: Make, name: str, path: str, kind: type[ServiceError], field: str
) -> None:
    rig = make(static={"static": "/any/where"})
    with pytest.raises(kind) as raised:
        rig.load(name, path)
    assert raised.value.field == field
    assert rig.names == ["static"]


def test_adapters_of_the_start_stay(make: Make) -> None:
    rig = make(static={"static": "/any/where"})
    assert rig.directory.ref_of(submit(adapter="static")) is not None
    with pytest.raises(Mismatch, match="--lora-modules"):
        rig.directory.unload("static")


def test_a_request_brings_what_its_adapter_is(make: Make) -> None:
    rig = make()
    info = types_pb2.AdapterInfo(name="a", path="/adapters/a", digest=bytes(16))
    ref = rig.directory.ref_of(submit(adapter="a", adapter_info=info))
    assert ref is not None
    assert ref.digest == bytes(16)
    assert rig.directory.ref_of(submit()) is None
    with pytest.raises(NotFound, match="is not loaded on this worker"):
        rig.directory.ref_of(submit(adapter="a"))
    info.path = "/etc"
    with pytest.raises(PermissionDenied):
        rig.directory.ref_of(submit(adapter="a", adapter_info=info))
    info.path, info.digest = "/adapters/a", b"short"
    with pytest.raises(InvalidRequest) as raised:
        rig.directory.ref_of(submit(adapter="a", adapter_info=info))
    assert raised.value.field == "adapter_info.digest"


def test_a_folder_is_read_again_and_again(make: Make, tmp_path: Path) -> None:
    for name in ("first", "base"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "other").mkdir()
    rig = make(resolver_folder=str(tmp_path))
    rig.directory.check()
    assert rig.names == ["first"], "no adapter takes the model's name"
    assert rig.pool.num_in_host_memory == 0, "it is read when it is used"
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "adapter_config.json").write_text("{}")
    (tmp_path / "first" / "adapter_config.json").unlink()
    deadline = time.monotonic() + 10
    while rig.names != ["second"]:
        assert time.monotonic() < deadline
        rig.directory.check()
        time.sleep(0.02)
    ref = rig.directory.ref_of(submit(adapter="second"))
    assert ref is not None
    assert ref.path == str(tmp_path / "second")


def test_names_pin_their_adapters_until_they_are_replaced_or_unloaded(make: Make) -> None:
    rig = make(static={"static": "/any/where"})
    assert rig.load("a", "/adapters/a", pinned=True).adapter.pinned
    assert rig.pool.num_pinned == 1
    assert rig.load("b", "/adapters/a", pinned=True).adapter.pinned, "the same contents"
    with pytest.raises(NoCapacity, match="at most 1 of the 2 slots"):
        rig.load("c", "/adapters/c", pinned=True)
    assert rig.names == ["a", "b", "static"], "nothing is loaded"
    rig.load("a", "/adapters/x", replace=True)
    assert rig.pool.num_pinned == 1
    rig.directory.unload("b")
    assert rig.pool.num_pinned == 0
    assert rig.directory.counters().num_pinned == 0


def test_adapters_of_the_start_may_be_pinned(make: Make) -> None:
    rig = make(static={"static": "/any/where", "other": "/other"}, pinned=("static",))
    assert {info.name: info.pinned for info in rig.directory.infos()} == {"static": True, "other": False}
    while rig.pool.on_device() != ["static"]:
        rig.pool.settle(0)


def test_contents_on_the_device_are_there_by_each_of_their_names(make: Make) -> None:
    rig = make()
    for name, path in (("a", "/adapters/x"), ("alias", "/adapters/x"), ("b", "/adapters/b")):
        rig.load(name, path)
    for owner, (name, path) in enumerate((("a", "/adapters/x"), ("brought", "/adapters/brought"))):
        rig.pool.want(owner, AdapterRef(name, path, rig.memory.digest(path)))
        while len(rig.pool.resident()) <= owner:
            rig.pool.settle(0)
    assert rig.directory.on_device() == ["a", "alias", "brought"]
    assert rig.directory.counters().num_on_device == 2
    rig.load("a", "/adapters/y", replace=True)
    assert rig.directory.on_device() == ["alias", "brought"], "its new contents are not there yet"
