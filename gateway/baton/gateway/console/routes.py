"""GET /console: the fleet for operators. The page is public and contains no data; the data need the admin scope."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import msgspec

from baton.gateway.access.credential import keys_in_headers
from baton.gateway.access.identity import Scope
from baton.gateway.console.broadcast import Broadcast
from baton.gateway.console.explanation import explanation_of
from baton.gateway.console.fleet_view import MAX_PLACEMENTS, FleetView
from baton.gateway.errors.http import HttpError
from baton.gateway.http.exchange import Exchange
from baton.gateway.playground.routes import FOLDER as PLAYGROUND
from baton.gateway.playground.routes import StaticFile, read_files
from baton.gateway.rest.routing import Parameter, Route
from baton.gateway.rest.sse import CONTENT_TYPE
from baton.gateway.routers.fleet_control import FleetControl, Routers
from baton.gateway.serving.context import ServingContext
from baton.gateway.system.admin import AdminRoutes, Query
from baton.rpc.errors import InvalidRequest
from baton.v1 import router_pb2

PAGE = Path(__file__).parent / "page"
PREFIX = "/console/"
# Shared with the playground: the appearance, and the storage of a tab's key.
SHARED = ("dom.js", "icon.svg", "sse.js", "store.js", "theme.css", "theme.js")

_ERRORS = (403, 429, 503)
_MOST_PLACEMENT_ID = 2**64 - 1
_PLACEMENT_ID = Parameter("placement_id", "The placement's id.", {"type": "integer", "minimum": 0})
_REQUEST_ID = Parameter("request_id", "The id of the placement's request.", {"type": "string"})


class Console:
    """Handles the routes of the page's data."""

    def __init__(self, serving: ServingContext, routers: Routers) -> None:
        self._routers = routers
        self._view = FleetView()

        def check(exchange: Exchange) -> None:
            serving.gate.identify(keys_in_headers(exchange.headers), Scope.ADMIN)

        self._broadcast = Broadcast(self._snapshot, check, lambda: serving.admission.draining)

    async def stream(self, exchange: Exchange, query: Query) -> None:
        """Handles GET /console/stream: one snapshot per second as server-sent events."""
        if exchange.method == "HEAD":
            exchange.respond(200, headers={"content-type": CONTENT_TYPE})
            return
        self._broadcast.watch(exchange)

    async def placement(self, exchange: Exchange, query: Query) -> None:
        """Handles GET /console/placement: explains one placement."""
        response = await self._routers.explain(explain_request(query))
        exchange.respond(200, msgspec.json.encode(explanation_of(response)))

    async def _snapshot(self) -> bytes:
        replies = await self._routers.fleets(MAX_PLACEMENTS)
        return msgspec.json.encode(self._view.take(replies, time.monotonic(), time.time()))


def console_routes(serving: ServingContext, fleet: FleetControl | None) -> list[Route]:
    """Returns the routes of the page, its files and its data; none if the console is disabled."""
    if serving.config.no_console or fleet is None:
        return []
    shared = {name: file for name, file in read_files(PLAYGROUND).items() if name in SHARED}
    files = {**read_files(PAGE), **shared}
    page = files.pop("index.html")
    console, door = Console(serving, fleet.routers), AdminRoutes(serving, fleet)
    return [
        Route("GET", "/console", page.answer, "Returns the console's page.", content_type="text/html", public=True),
        Route(
            "GET",
            "/console/stream",
            door.handler(console.stream),
            "Streams one snapshot of the fleet per second.",
            content_type="text/event-stream",
            errors=_ERRORS,
            scope=Scope.ADMIN,
        ),
        Route(
            "GET",
            "/console/placement",
            door.handler(console.placement),
            "Explains a placement.",
            errors=(400, 404, *_ERRORS),
            parameters=(_PLACEMENT_ID, _REQUEST_ID),
            scope=Scope.ADMIN,
        ),
        Route(
            "GET",
            PREFIX + "{file}",
            partial(_answer_file, files),
            "Returns a file of the console.",
            errors=(404,),
            public=True,
        ),
    ]


def explain_request(query: Query) -> router_pb2.ExplainRequest:
    """Converts a query. Raises InvalidRequest unless it has exactly one of placement_id and request_id."""
    placement_id, request_id = (query.get(name, [""])[-1] for name in ("placement_id", "request_id"))
    if bool(placement_id) == bool(request_id):
        raise InvalidRequest("give either placement_id or request_id", field="placement_id")
    if request_id:
        return router_pb2.ExplainRequest(request_id=request_id)
    is_number = placement_id.isascii() and placement_id.isdigit() and len(placement_id) <= 20
    if not is_number or int(placement_id) > _MOST_PLACEMENT_ID:
        raise InvalidRequest(
            f"placement_id is {placement_id[:40]!r}; it must be a number from 0 to {_MOST_PLACEMENT_ID}",
            field="placement_id",
        )
    return router_pb2.ExplainRequest(placement_id=int(placement_id))


def _answer_file(files: dict[str, StaticFile], exchange: Exchange) -> None:
    name = exchange.path.removeprefix(PREFIX)
    file = files.get(name)
    if file is None:
        raise HttpError(404, f"the console has no file {name!r}", param="file")
    file.answer(exchange)
