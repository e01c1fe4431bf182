"""Names that workers may load: once for all that wait, and not again soon after a failure."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
from support.engine.engine_harness import Clock
from support.gateway.scripted_gateway import SAMPLE

from baton.gateway.access.identity import ANONYMOUS, Identity, Tenant
from baton.gateway.models.served import ModelCatalog, ServedModel, UnknownModel, load_served_model
from baton.gateway.serving.name_resolver import MAX_MISSES, MAX_NAMES, NameResolver
from baton.rpc.errors import Mismatch, NoCapacity, NotFound, ServiceError, Unavailable
from baton.v1 import types_pb2

NAME = "base"


class Rig:
    """A resolver over a loader that waits for `gate` and then raises, or serves the name."""

    def __init__(self, catalog: ModelCatalog) -> None:
        self.catalog = catalog
        self.clock = Clock()
        self.error: ServiceError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.loads: list[str] = []
        self.counted: Counter[str] = Counter()
        self.names = NameResolver(catalog, self._load, 10.0, lambda one: self.counted.update([one]), self.clock)

    async def _load(self, name: str, model: ServedModel) -> None:
        self.loads.append(name)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.catalog.add_adapter(model.name, types_pb2.AdapterInfo(name=name, digest=bytes(16)))


@pytest.fixture
def catalog() -> Iterator[ModelCatalog]:
    catalog = ModelCatalog([load_served_model(str(SAMPLE), (NAME,))])
    catalog.update([types_pb2.ModelInfo(name=NAME, resolvable_adapters=["team/*", "poet"])])
    yield catalog
    catalog.close()


@pytest.fixture
async def rig(catalog: ModelCatalog) -> Rig:
    return Rig(catalog)


async def test_all_that_wait_share_one_load(rig: Rig) -> None:
    rig.gate.clear()
    waiting = [asyncio.create_task(rig.names.ensure(ANONYMOUS, "team/a")) for _ in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting[0].cancel()
    rig.gate.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [None] * 4, "a client that goes away ends the load for no other"
    assert rig.loads == ["team/a"]
    assert rig.catalog.get("team/a").base_name == NAME
    await rig.names.ensure(ANONYMOUS, "team/a")
    assert rig.loads == ["team/a"], "it is known now"
    assert rig.counted == {"loaded": 1}


@pytest.mark.parametrize("name", [NAME, "team", "Poet", "other"])
async def test_names_that_no_pattern_allows_are_left_alone(rig: Rig, name: str) -> None:
    await rig.names.ensure(ANONYMOUS, name)
    assert not rig.loads


async def test_a_tenant_loads_only_its_own_names(rig: Rig) -> None:
    limited = Identity(Tenant("a", models=frozenset({NAME, "team/a"})))
    await rig.names.ensure(limited, "team/b")
    assert not rig.names.may_resolve(limited, "team/b")
    assert not rig.loads
    await rig.names.ensure(limited, "team/a")
    assert rig.loads == ["team/a"]


@pytest.mark.parametrize(
    ("error", "kind", "outcome"),
    [
        (NotFound("no adapter is called", field="lora_name"), UnknownModel, "missing"),
        (Mismatch("it is for another base", field="lora_path"), Mismatch, "failed"),
    ],
)
async def test_a_failure_is_remembered_and_forgotten(
    rig: Rig, error: ServiceError, kind: type[ServiceError], outcome: str
) -> None:
    rig.error = error
    for _ in range(3):
        with pytest.raises(kind) as raised:
            await rig.names.ensure(ANONYMOUS, "team/a")
        assert raised.value.field == "model"
        raised.value.field = "adapter"  # as a caller may name it
    assert rig.loads == ["team/a"]
    assert rig.counted == {outcome: 1, "remembered": 2}
    rig.clock.now += 9.9
    with pytest.raises(kind):
        await rig.names.ensure(ANONYMOUS, "team/a")
    rig.clock.now += 0.2
    rig.error = None
    await rig.names.ensure(ANONYMOUS, "team/a")
    assert rig.loads == ["team/a"] * 2


async def test_what_may_pass_soon_is_not_remembered(rig: Rig) -> None:
    rig.error = Unavailable("no worker is alive")
    for _ in range(2):
        with pytest.raises(Unavailable):
            await rig.names.ensure(ANONYMOUS, "team/a")
    assert len(rig.loads) == 2


async def test_names_and_memory_of_failures_are_bounded(rig: Rig) -> None:
    rig.gate.clear()
    waiting = [asyncio.create_task(rig.names.ensure(ANONYMOUS, f"team/{number}")) for number in range(MAX_NAMES)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(NoCapacity):
        await rig.names.ensure(ANONYMOUS, "team/more")
    rig.error = NotFound("no")
    rig.gate.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    for number in range(MAX_MISSES):
        with pytest.raises(UnknownModel):
            await rig.names.ensure(ANONYMOUS, f"team/next-{number}")
    rig.loads.clear()
    for name in ("team/0", f"team/next-{MAX_MISSES - 1}"):
        with pytest.raises(UnknownModel):
            await rig.names.ensure(ANONYMOUS, name)
    assert rig.loads == ["team/0"], "the oldest was dropped"
