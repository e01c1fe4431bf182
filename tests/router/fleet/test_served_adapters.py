"""The adapters of a model are those of all its workers."""

from __future__ import annotations

from support.fleet.fleet_node import state

from baton.router.fleet.served_models import served_models
from baton.router.fleet.worker_view import WorkerView, view_of
from baton.v1 import types_pb2


def worker(name: str, *adapters: tuple[str, int]) -> tuple[WorkerView, types_pb2.ModelInfo]:
    """Returns a worker with adapters, each a name and the time of its registration."""
    made = state(name)
    for adapter, registered_ms in adapters:
        digest = bytes([registered_ms]) * 16
        made.model.adapters.add(name=adapter, path=f"/{adapter}", digest=digest, registered_ms=registered_ms)
    return view_of(made, name, False, 0.0, None), made.model


def found(*workers: tuple[WorkerView, types_pb2.ModelInfo]) -> list[tuple[str, int]]:
    (model,) = served_models(workers, {}).values()
    return [(adapter.name, adapter.registered_ms) for adapter in model.adapters]


def test_a_model_has_the_adapters_of_all_workers_by_name() -> None:
    assert found(worker("w0", ("b", 1)), worker("w1", ("a", 1), ("b", 1)), worker("w2")) == [("a", 1), ("b", 1)]


def test_of_one_name_the_latest_registration_is_served() -> None:
    assert found(worker("w0", ("a", 3)), worker("w1", ("a", 4)), worker("w2", ("a", 2))) == [("a", 4)]


def test_workers_states_are_not_changed() -> None:
    first, second = worker("w0", ("a", 1)), worker("w1", ("b", 1))
    served_models([first, second], {})
    assert [adapter.name for adapter in first[1].adapters] == ["a"]
    assert [adapter.name for adapter in second[1].adapters] == ["b"]


def test_names_can_be_resolved_that_all_workers_resolve() -> None:
    def live(worker_id: str, *patterns: str) -> tuple[WorkerView, types_pb2.ModelInfo]:
        view, model = worker(worker_id)
        model.resolvable_adapters.extend(patterns)
        return view, model

    (one,) = served_models([live("a", "team/*", "poet"), live("b", "poet", "team/*")], {}).values()
    assert sorted(one.resolvable_adapters) == ["poet", "team/*"]
    (one,) = served_models([live("a", "team/*", "poet"), live("b", "poet")], {}).values()
    assert list(one.resolvable_adapters) == ["poet"]
    (one,) = served_models([live("a", "team/*"), live("b")], {}).values()
    assert not one.resolvable_adapters
