"""Routes of plugins: each adds some of its own paths, and cannot replace a route of Baton's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from baton.gateway.rest.routing import Route
from baton.gateway.serving.context import ServingContext
from baton.plugins.kinds import ENDPOINTS
from baton.plugins.plugins import Plugins

# What an endpoint's entry point names: returns its routes.
MakeRoutes = Callable[[ServingContext], Sequence[Route]]


def plugin_routes(plugins: Plugins, serving: ServingContext, others: Sequence[Route]) -> list[Route]:
    """Returns the routes of all endpoints. Raises PluginError for a method of a path that has a route."""
    taken = {(route.method, route.path) for route in others}
    added: list[Route] = []

    def make(found: Any) -> None:
        for route in _routes_of(found, serving):
            if (route.method, route.path) in taken:
                raise ValueError(f"{route.method} {route.path} has a route already; use a path of your own")
            taken.add((route.method, route.path))
            added.append(route)

    plugins.start(ENDPOINTS, make)
    return added


def _routes_of(found: Any, serving: ServingContext) -> list[Route]:
    if not callable(found):
        raise TypeError(f"it is a {type(found).__name__}; it must be a function that returns routes")
    routes = list(found(serving))
    for route in routes:
        if not isinstance(route, Route):
            raise TypeError(f"it returned a {type(route).__name__}; it must return a list of Route")
    return routes
