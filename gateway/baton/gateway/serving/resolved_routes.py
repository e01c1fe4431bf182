"""Routes whose requests may name adapters that are not loaded yet: such a request is handled again once they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.gateway.access.identity import Scope
from baton.gateway.errors.http import http_error_of
from baton.gateway.http.exchange import Exchange
from baton.gateway.models.served import UnknownModel
from baton.gateway.rest.routing import Handler, Route
from baton.gateway.serving.context import ServingContext
from baton.gateway.serving.name_resolver import NameResolver
from baton.rpc.errors import ServiceError


class _Resolving:
    """Wraps a handler that looks its model up before it changes anything but the list of ignored fields."""

    def __init__(self, inner: Handler, serving: ServingContext, names: NameResolver, generates: bool) -> None:
        self._inner = inner
        self._serving = serving
        self._names = names
        self._generates = generates

    async def __call__(self, exchange: Exchange) -> None:
        ignored = exchange.ignored
        try:
            await self._handle(exchange)
            return
        except UnknownModel as error:
            if not self._names.may_resolve(exchange.identity, error.name):
                raise
            name = error.name
        try:
            await self._names.resolve(name)
        except ServiceError as error:
            if self._generates:
                self._serving.metrics.generation_rejected(http_error_of(error).type)
            raise
        exchange.ignored = ignored
        await self._handle(exchange)

    async def _handle(self, exchange: Exchange) -> None:
        work = self._inner(exchange)
        if work is not None:
            await work


def resolved_routes(routes: Sequence[Route], serving: ServingContext) -> list[Route]:
    """Returns the routes, of which those that take a model's name in a body load adapters when they are named."""
    names = serving.names
    if names is None:
        return list(routes)
    return [
        replace(route, handler=_Resolving(route.handler, serving, names, route.chunk is not None))
        if route.method == "POST" and route.scope is Scope.INFERENCE and route.request is not None
        else route
        for route in routes
    ]
