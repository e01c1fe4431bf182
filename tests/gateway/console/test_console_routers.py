"""What a gateway asks of several routers for its consoles: of all at once, or of one after the other."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from support.gateway.scripted_services import ScriptedRouter

from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.routers.client import RouterClient
from baton.rpc.errors import NotFound, Unavailable
from baton.v1 import router_pb2


class ScriptedRouter(ScriptedRouter):
    """A scripted router with a fleet and one placement."""

    def __init__(self, router_id: int, known_id: int) -> None:
        super().__init__([])
        self.router_id = router_id
        self.known_id = known_id
        self.asked: list[int] = []  # max_placements

    async def GetFleet(self, request, context):  # noqa: N802
        self.asked.append(request.max_placements)
        return router_pb2.GetFleetResponse(router_id=self.router_id)

    async def Explain(self, request, context):  # noqa: N802
        if request.placement_id != self.known_id:
            raise NotFound(f"placement {request.placement_id} is unknown")
        return router_pb2.ExplainResponse(router_id=self.router_id)


@asynccontextmanager
async def two_routers():
    async with ScriptedRouter(1, 11) as one, ScriptedRouter(2, 22) as two:
        client = RouterClient([one.address, two.address], lambda models: None, GenerationCounters())
        async with client:
            yield client, one, two


def explain(placement_id: int) -> router_pb2.ExplainRequest:
    return router_pb2.ExplainRequest(placement_id=placement_id)


async def test_every_router_is_asked_for_its_fleet_and_a_silent_one_is_named():
    async with two_routers() as (client, one, two):
        words = await client.fleets(7)
        assert {word.fleet.router_id for word in words if word.fleet is not None} == {1, 2}
        assert one.asked == two.asked == [7]
        await two.stop()
        told = {word.address: word for word in await client.fleets(7)}
        assert told[one.address].problem == ""
        assert told[two.address].fleet is None
        assert "UNAVAILABLE" in told[two.address].problem


async def test_an_explanation_comes_from_the_router_that_has_it():
    async with two_routers() as (client, _, two):
        assert (await client.explain(explain(11))).router_id == 1
        assert (await client.explain(explain(22))).router_id == 2
        with pytest.raises(NotFound, match="placement 33 is unknown"):
            await client.explain(explain(33))
        await two.stop()
        with pytest.raises(NotFound):
            await client.explain(explain(22))


async def test_without_any_router_an_explanation_can_be_asked_for_later():
    async with two_routers() as (client, one, two):
        await one.stop()
        await two.stop()
        with pytest.raises(Unavailable, match="no router answered"):
            await client.explain(explain(11))
