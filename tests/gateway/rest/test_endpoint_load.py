"""The response header with the fleet's load."""

import asyncio
import json

import pytest
from support.gateway.rest_harness import RawClient
from support.gateway.scripted_gateway import running

from baton.gateway.access.identity import Identity, Scope, Tenant
from baton.gateway.rest.endpoint_load import EndpointLoad
from baton.gateway.routers.client import RouterReply
from baton.rpc.errors import InvalidRequest, PermissionDenied
from baton.v1 import router_pb2

OPERATOR = Identity(Tenant())


def worker(model="m", alive=True, **load):
    state = {"worker_id": "w", "model": {"name": model}, "load": load}
    return router_pb2.WorkerEntry(alive=alive, state=state)


class Routers:
    """Scripted replies, counted."""

    def __init__(self, *replies):
        self.replies = replies
        self.num_asked = 0

    async def fleets(self, max_placements):
        self.num_asked += 1
        await asyncio.sleep(0)
        return self.replies


FLEET = router_pb2.GetFleetResponse(
    workers=[
        worker(num_blocks=100, num_free_blocks=40, queue_depth=3),
        worker(num_blocks=300, num_free_blocks=260, queue_depth=4),
        worker(model="other", num_blocks=9, queue_depth=9),
        worker(alive=False, num_blocks=9, queue_depth=9),
    ]
)


def load_of(*replies, clock=lambda: 0.0):
    routers = Routers(*replies)
    return EndpointLoad(routers, lambda: ["m"], clock), routers


async def test_both_forms_have_the_load_of_this_gateways_live_workers():
    load, _ = load_of(RouterReply("a", None, "dead"), RouterReply("b", FLEET))
    expected = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 7.0}
    header = (await load.header("json", OPERATOR))["endpoint-load-metrics"]
    assert header.startswith("JSON ")
    assert json.loads(header[5:]) == {"named_metrics": expected}
    header = (await load.header("TEXT", OPERATOR))["endpoint-load-metrics"]
    assert header == "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=7.0"


async def test_many_requests_ask_the_router_once():
    now = [0.0]
    load, routers = load_of(RouterReply("b", FLEET), clock=lambda: now[0])
    await asyncio.gather(*(load.header("TEXT", OPERATOR) for _ in range(20)))
    assert routers.num_asked == 1
    now[0] = 0.6
    await load.header("TEXT", OPERATOR)
    assert routers.num_asked == 2


async def test_without_a_router_there_is_no_header():
    load, _ = load_of(RouterReply("a", None, "dead"))
    assert await load.header("TEXT", OPERATOR) == {}


async def test_other_forms_and_keys_without_the_scope_are_refused():
    load, routers = load_of(RouterReply("b", FLEET))
    with pytest.raises(InvalidRequest, match="TEXT, JSON"):
        await load.header("BIN", OPERATOR)
    with pytest.raises(PermissionDenied, match="scope metrics"):
        await load.header("TEXT", Identity(Tenant("a"), {Scope.INFERENCE}))
    assert routers.num_asked == 0


async def test_answers_and_streams_carry_it_if_the_request_asks():
    async with running(lambda submit: [260, 4]) as gateway, RawClient.connect(gateway.port) as client:
        asks = {"endpoint-load-metrics-format": "TEXT"}
        for body in ({"prompt": "Hi"}, {"prompt": "Hi", "stream": True}):
            plain = await client.request("POST", "/v1/completions", body)
            assert (plain.status, "endpoint-load-metrics" in plain.headers) == (200, False)
            answer = await client.request("POST", "/v1/completions", body, asks)
            assert answer.status == 200
        refused = await client.request("POST", "/v1/completions", {"prompt": "Hi"}, dict.fromkeys(asks, "X"))
        assert (refused.status, refused.error["param"]) == (400, "endpoint-load-metrics-format")
