"""Adapters as models of a gateway: from workers' reports, and at once after a change made here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engine.engine_harness import Clock
from support.gateway.scripted_gateway import SAMPLE

from baton.gateway.access.identity import Identity, Tenant
from baton.gateway.core import GenerationRequest
from baton.gateway.generation.generator import adapted
from baton.gateway.generation.hashed_prompt import namespace_of
from baton.gateway.models.served import ModelCatalog, load_served_model
from baton.gateway.serving.tenancy import allowed_model, allowed_models
from baton.rpc.errors import NotFound
from baton.v1 import types_pb2

NAME = "base"


def info(*adapters: types_pb2.AdapterInfo) -> types_pb2.ModelInfo:
    return types_pb2.ModelInfo(name=NAME, digest=bytes(16), max_model_len=64, block_size=16, adapters=adapters)


def adapter(name: str, number: int = 1, registered_ms: int = 1) -> types_pb2.AdapterInfo:
    return types_pb2.AdapterInfo(name=name, path=f"/{name}", digest=bytes([number]) * 16, registered_ms=registered_ms)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def catalog(clock: Clock) -> Iterator[ModelCatalog]:
    catalog = ModelCatalog([load_served_model(str(SAMPLE), (NAME, "alias"))], clock)
    yield catalog
    catalog.close()


def names(catalog: ModelCatalog) -> list[str]:
    return [view.name for view in catalog.adapters()]


def test_reported_adapters_are_views_of_their_model(catalog: ModelCatalog) -> None:
    catalog.update([info(adapter("b"), adapter("a"))])
    assert names(catalog) == ["a", "b"]
    view = catalog.get("a")
    assert (view.name, view.base_name, view.adapter) == ("a", NAME, adapter("a"))
    assert view.tokenizer is catalog.get(NAME).tokenizer
    assert view.require_info().max_model_len == 64
    catalog.update([info(adapter("b"))])
    with pytest.raises(NotFound, match="`a` does not exist"):
        catalog.get("a")


def test_a_model_keeps_its_names(catalog: ModelCatalog) -> None:
    catalog.update([info(adapter("alias"), adapter(NAME))])
    assert names(catalog) == []
    assert catalog.get("alias").adapter is None


def test_changes_made_here_count_before_they_are_reported(catalog: ModelCatalog, clock: Clock) -> None:
    catalog.update([info(adapter("old"))])
    catalog.add_adapter(NAME, adapter("new"))
    catalog.remove_adapter("old")
    catalog.update([info(adapter("old"))])
    assert names(catalog) == ["new"], "the report is older"
    clock.sleep(10)
    catalog.update([info(adapter("old"))])
    assert names(catalog) == ["old"], "it is not: workers lost one and have the other"


def test_what_another_gateway_removes_is_gone_with_the_next_report(catalog: ModelCatalog) -> None:
    catalog.add_adapter(NAME, adapter("a"))
    catalog.update([info()])
    assert names(catalog) == ["a"], "not reported yet"
    catalog.update([info(adapter("a"))])
    catalog.update([info()])
    assert names(catalog) == []


def test_a_report_may_come_before_the_answers_of_workers(catalog: ModelCatalog) -> None:
    catalog.update([info(adapter("a"))])
    catalog.add_adapter(NAME, adapter("a"))
    catalog.update([info()])
    assert names(catalog) == []


def test_what_no_report_ever_shows_ends_without_a_report(catalog: ModelCatalog, clock: Clock) -> None:
    catalog.update([info()])
    catalog.add_adapter(NAME, adapter("a"))
    clock.sleep(10)
    assert names(catalog) == [], "another gateway removed it before it was reported"
    with pytest.raises(NotFound):
        catalog.get("a")


def test_what_another_gateway_loads_again_is_served_at_once(catalog: ModelCatalog) -> None:
    catalog.update([info(adapter("a", registered_ms=5))])
    catalog.remove_adapter("a")
    catalog.update([info(adapter("a", registered_ms=5))])
    assert names(catalog) == [], "the report is older"
    catalog.update([info(adapter("a", registered_ms=6))])
    assert names(catalog) == ["a"]


def test_of_a_replaced_adapter_the_latest_is_served(catalog: ModelCatalog) -> None:
    catalog.add_adapter(NAME, adapter("a", 2, registered_ms=5))
    catalog.update([info(adapter("a", 1, registered_ms=4))])
    assert catalog.get("a").adapter == adapter("a", 2, registered_ms=5)
    catalog.update([info(adapter("a", 3, registered_ms=6))])
    assert catalog.get("a").adapter == adapter("a", 3, registered_ms=6)


def test_tenants_use_the_adapters_that_they_list(catalog: ModelCatalog) -> None:
    catalog.update([info(adapter("a"), adapter("b"))])
    limited = Identity(Tenant("t", models=frozenset({"a"})))
    assert [model.name for model in allowed_models(catalog, limited)] == ["a"]
    assert allowed_model(catalog, limited, "a").adapter == adapter("a")
    for name in ("b", NAME):
        with pytest.raises(NotFound):
            allowed_model(catalog, limited, name)
    assert [model.name for model in allowed_models(catalog, Identity(Tenant()))] == [NAME, "a", "b"]


def test_a_model_and_its_adapter_may_be_given_apart(catalog: ModelCatalog) -> None:
    catalog.update([info(adapter("a"))])
    assert adapted(catalog, NAME, "a").adapter == adapter("a")
    assert adapted(catalog, "a", "").adapter == adapter("a")
    for wrong in ("b", NAME):
        with pytest.raises(NotFound):
            adapted(catalog, NAME, wrong)


def test_blocks_belong_to_the_contents_of_an_adapter() -> None:
    request = GenerationRequest("r", NAME, [1, 2])
    bases = [namespace_of(request, info(), one) for one in (None, adapter("a", 1), adapter("b", 1), adapter("a", 2))]
    assert bases[1] == bases[2], "two names, the same files"
    assert len(set(bases)) == 3
