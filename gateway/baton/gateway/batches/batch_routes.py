"""The routes of /v1/batches, and the answer of all routes where there is no store."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec

from baton.gateway.batches.file_routes import file_routes
from baton.gateway.batches.files import Files
from baton.gateway.batches.pages import page_query
from baton.gateway.batches.service import Batches
from baton.gateway.batches.types import BatchList, BatchObject, CreateBatch
from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.bodies.thread import BodyThread
from baton.gateway.errors.http import HttpError
from baton.gateway.http.exchange import Exchange
from baton.gateway.rest.routing import Parameter, Route

PATH = "/v1/batches"

_MAX_PAGE = 100
_DEFAULT_PAGE = 20
_IDS = "batch_[^/]+"
_PARAMETERS = (
    Parameter(
        "limit", "Batches per page.", {"type": "integer", "minimum": 1, "maximum": _MAX_PAGE, "default": _DEFAULT_PAGE}
    ),
    Parameter("after", "The id of the batch before the page.", {"type": "string"}),
)


class BatchRoutes:
    """Handles the routes of batches."""

    def __init__(self, batches: Batches, bodies: BodyThread, strict: bool) -> None:
        self._batches = batches
        self._bodies = bodies
        self._decoder = BodyDecoder(CreateBatch, strict, bodies.reader)

    async def create(self, exchange: Exchange) -> None:
        """Handles POST /v1/batches."""
        request = await self._bodies.run(partial(self._decoder.read, exchange), exchange.num_body_bytes, exchange.owner)
        _respond(exchange, await self._batches.create(exchange.identity.tenant.name, request))

    async def list(self, exchange: Exchange) -> None:
        """Handles GET /v1/batches."""
        query = page_query(exchange.query, _DEFAULT_PAGE, _MAX_PAGE)
        batches, has_more = await self._batches.page(exchange.identity.tenant.name, query)
        first, last = (batches[0].id, batches[-1].id) if batches else (None, None)
        page = BatchList(data=batches, first_id=first, last_id=last, has_more=has_more)
        exchange.respond(200, msgspec.json.encode(page))

    async def get(self, exchange: Exchange) -> None:
        """Handles GET /v1/batches/{batch_id}."""
        _respond(exchange, await self._batches.get(exchange.identity.tenant.name, _id_of(exchange)))

    async def cancel(self, exchange: Exchange) -> None:
        """Handles POST /v1/batches/{batch_id}/cancel."""
        _respond(exchange, await self._batches.cancel(exchange.identity.tenant.name, _id_of(exchange)))


def batch_routes(batches: Batches, files: Files, bodies: BodyThread, strict: bool) -> list[Route]:
    """Returns the routes of files and batches."""
    return [*file_routes(files), *_routes(BatchRoutes(batches, bodies, strict))]


def routes_without_store() -> list[Route]:
    """Returns the same routes, which answer that there is no store."""

    def refuse(exchange: Exchange) -> None:
        message = (
            f"{exchange.method} {exchange.path}: this gateway stores no files and runs no batches; start it with "
            "--batch-store FOLDER or s3://BUCKET/PREFIX"
        )
        raise HttpError(501, message, headers={"x-should-retry": "false"})

    described = batch_routes(None, None, BodyThread(), False)  # type: ignore[arg-type]
    return [replace(route, handler=refuse, errors=(*route.errors, 501)) for route in described]


def _routes(handlers: BatchRoutes) -> list[Route]:
    one, errors = f"{PATH}/{{batch_id}}", (400, 404, 503)
    return [
        Route(
            "POST",
            PATH,
            handlers.create,
            "Runs the requests of a file at low priority.",
            CreateBatch,
            BatchObject,
            errors=(*errors, 408, 413),
        ),
        Route(
            "GET",
            PATH,
            handlers.list,
            "Lists the batches.",
            response=BatchList,
            errors=(400, 503),
            parameters=_PARAMETERS,
        ),
        Route("GET", one, handlers.get, "Returns a batch.", response=BatchObject, errors=errors, ids=_IDS),
        Route("POST", f"{one}/cancel", handlers.cancel, "Cancels a batch.", None, BatchObject, errors=errors, ids=_IDS),
    ]


def _respond(exchange: Exchange, batch: BatchObject) -> None:
    exchange.respond(200, msgspec.json.encode(batch))


def _id_of(exchange: Exchange) -> str:
    return exchange.path.removeprefix(f"{PATH}/").partition("/")[0]
