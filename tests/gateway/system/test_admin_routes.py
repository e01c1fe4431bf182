"""Authorization of worker operations through the gateway, and refusals before any call of a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from baton.gateway.access.gate import OpenGate
from baton.gateway.access.identity import Identity, Scope, Tenant
from baton.gateway.rest.routing import Route
from baton.gateway.routers.fleet_control import FleetControl
from baton.gateway.system.admin import admin_routes
from baton.rpc.channel import Dial
from baton.rpc.errors import InvalidRequest, Mismatch, NotFound, PermissionDenied, ServiceError, Unavailable
from baton.v1 import control_pb2, router_pb2


class Routers:
    """Scripted routers' answers, and the number of calls."""

    def __init__(self, *entries: router_pb2.WorkerEntry) -> None:
        self.entries = entries
        self.num_asked = 0

    async def workers(self) -> Sequence[router_pb2.WorkerEntry]:
        self.num_asked += 1
        return self.entries


def entry(worker_id: str, model: str = "m", alive: bool = True, role: str = "both") -> router_pb2.WorkerEntry:
    state: Any = {"worker_id": worker_id, "model": {"name": model}, "role": f"WORKER_ROLE_{role.upper()}"}
    return router_pb2.WorkerEntry(address="127.0.0.1:1", alive=alive, state=state)


def routes_of(routers: Routers, listen: str = "127.0.0.1:8000", gate: object = None) -> dict[str, Route]:
    serving: Any = SimpleNamespace(gate=gate or OpenGate(), config=SimpleNamespace(rest_listen=listen))
    fleet = FleetControl(routers, lambda: ["m"], Dial())
    return {route.path: route for route in admin_routes(serving, fleet)}


async def refusal_of(route: Route, query: str = "", headers: dict[bytes, bytes] | None = None) -> ServiceError:
    """What a request is refused with."""
    exchange: Any = SimpleNamespace(query=query, headers=headers or {}, respond=_never)
    try:
        work = route.handler(exchange)
        assert work is not None
        await work
    except ServiceError as error:
        return error
    raise AssertionError("it was not refused")


def _never(*_: object) -> None:
    raise AssertionError("it was answered")


def test_every_route_requires_a_key_with_the_scope_admin():
    routes = routes_of(Routers())
    assert {route.scope for route in routes.values()} == {Scope.ADMIN}
    assert not any(route.public for route in routes.values())
    with pytest.raises(PermissionDenied):
        Identity(Tenant(), frozenset({Scope.INFERENCE, Scope.METRICS})).require(Scope.ADMIN)


@pytest.mark.parametrize("listen", ["0.0.0.0:8000", "[::]:8000", "10.1.2.3:80", "gateway.example:80"])
async def test_without_keys_a_gateway_beyond_loopback_rejects_operations(listen):
    routers = Routers(entry("w"))
    for route in routes_of(routers, listen).values():
        error = await refusal_of(route, "worker_id=w")
        assert isinstance(error, PermissionDenied)
        assert "--api-keys" in error.message
    assert routers.num_asked == 0


@pytest.mark.parametrize("listen", ["127.0.0.1:8000", "[::1]:8000", "localhost:8000"])
async def test_without_keys_loopback_will_do_but_for_web_pages(listen):
    route = routes_of(Routers(entry("w")), listen)["/sleep"]
    assert isinstance(await refusal_of(route, headers={b"origin": b"null"}), PermissionDenied)
    assert isinstance(await refusal_of(route), Unavailable)  # the worker was asked: nobody is there


async def test_with_keys_it_does_not_matter_where_a_gateway_listens():
    route = routes_of(Routers(entry("w")), "0.0.0.0:8000", gate=SimpleNamespace())["/sleep"]
    assert isinstance(await refusal_of(route, headers={b"origin": b"https://admin.example"}), Unavailable)


@pytest.mark.parametrize(
    "make", [lambda: entry("other", model="another's"), lambda: entry("dead", alive=False)], ids=["other", "dead"]
)
async def test_a_worker_that_is_none_of_its_own_is_unknown(make: Callable[[], router_pb2.WorkerEntry]):
    one = make()
    error = await refusal_of(routes_of(Routers(entry("w"), one))["/drain"], f"worker_id={one.state.worker_id}")
    assert isinstance(error, NotFound)
    assert (error.field, "give one of: w" in error.message) == ("worker_id", True)


@pytest.mark.parametrize(
    ("path", "query", "field"),
    [
        ("/sleep", "level=0", "level"),
        ("/sleep", "level=two", "level"),
        ("/sleep", "level=99999999999999", "level"),
        ("/pause", "mode=", None),
        ("/pause", "mode=later", "mode"),
        ("/pause", "timeout=-1", "timeout"),
        ("/pause", "timeout=nan", "timeout"),
        ("/pause", "timeout=inf", "timeout"),
        ("/pause", "clear_cache=perhaps", "clear_cache"),
        ("/start_profile", "num_steps=1.5", "num_steps"),
        ("/drain", "", "worker_id"),
        ("/switch_role", "worker_id=w", "role"),
        ("/switch_role", "worker_id=w&role=encode", "role"),
        ("/switch_role", "role=both", "worker_id"),
    ],
)
async def test_a_query_that_makes_no_sense_is_refused_before_anybody_is_asked(path, query, field):
    routers = Routers(entry("w"))
    error = await refusal_of(routes_of(routers)[path], query)
    if field is None:  # an empty value is none
        assert isinstance(error, Unavailable)
        return
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert routers.num_asked == 0


async def test_no_worker_at_all_is_reported():
    assert "no worker is alive" in (await refusal_of(routes_of(Routers())["/sleep"])).message


@pytest.mark.parametrize(
    ("others", "query", "is_last"),
    [
        ([], "worker_id=w&role=prefill", True),
        ([entry("x", role="prefill")], "worker_id=w&role=prefill", True),
        ([entry("x", alive=False), entry("y", model="another's")], "worker_id=w&role=prefill", True),
        ([entry("x")], "worker_id=w&worker_id=x&role=prefill", True),
        ([entry("x", role="decode")], "worker_id=w&role=prefill", False),
        ([], "worker_id=w&role=decode", False),
    ],
)
async def test_the_last_worker_that_decodes_keeps_its_role(others, query, is_last):
    error = await refusal_of(routes_of(Routers(entry("w"), *others))["/switch_role"], query)
    assert isinstance(error, Mismatch if is_last else Unavailable)  # unavailable: the worker was asked
    assert ("no other worker decodes for m" in error.message) is is_last


class Sleepers:
    """Stands in for FleetControl: one worker, and the parts that it was asked to wake."""

    def __init__(self) -> None:
        self.woken: list[list[int]] = []

    async def ask_all(self, worker_ids: Sequence[str], call: Callable[[Any], Any]) -> dict[str, Any]:
        def wake_up(request: control_pb2.WakeUpRequest, **_: Any) -> control_pb2.WakeUpResponse:
            self.woken.append(list(request.parts))
            return control_pb2.WakeUpResponse()

        return {"w": call(SimpleNamespace(WakeUp=wake_up))}


@pytest.mark.parametrize(
    ("query", "parts"),
    [
        ("", []),
        ("tags=weights", [control_pb2.MEMORY_PART_WEIGHTS]),
        ("tags=kv_cache&tags=kv_cache", [control_pb2.MEMORY_PART_KV_CACHE]),
        ("tags=weights&tags=kv_cache", [control_pb2.MEMORY_PART_WEIGHTS, control_pb2.MEMORY_PART_KV_CACHE]),
        ("tags=weights,kv_cache", [control_pb2.MEMORY_PART_WEIGHTS, control_pb2.MEMORY_PART_KV_CACHE]),
    ],
)
async def test_tags_name_the_parts_that_wake_up(query, parts):
    serving: Any = SimpleNamespace(gate=SimpleNamespace(), config=SimpleNamespace(rest_listen="127.0.0.1:8000"))
    sleepers: Any = Sleepers()
    route = next(one for one in admin_routes(serving, sleepers) if one.path == "/wake_up")
    exchange: Any = SimpleNamespace(query=query, headers={}, respond=lambda *_: None)
    await route.handler(exchange)
    assert sleepers.woken == [parts]


async def test_parts_that_cannot_sleep_have_no_tag():
    routers = Routers(entry("w"))
    error = await refusal_of(routes_of(routers)["/wake_up"], "tags=scheduling")
    assert "give one of weights, kv_cache" in error.message
    assert routers.num_asked == 0
