"""What a route is, and the table that finds one for a request."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from baton.gateway.access.identity import Scope
from baton.gateway.error_body import HttpError
from baton.gateway.http_exchange import Exchange

Handler = Callable[[Exchange], Coroutine[None, None, None] | None]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that the client may give; `schema` is JSON Schema."""

    name: str
    summary: str
    schema: Mapping[str, Any]
    place: str = "query"  # or header


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path.

    A path that ends in `{name}` takes whatever follows, slashes included; a `{name}` before more path takes what
    comes in between.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    request: type[Struct] | None = None
    response: type[Struct] | None = None  # None: no JSON
    chunk: type[Struct] | None = None  # of the event stream that `stream: true` asks for
    content_type: str = "application/json"
    errors: tuple[int, ...] = ()  # statuses beside 200 and those of every route
    parameters: tuple[Parameter, ...] = ()
    scope: Scope | None = Scope.INFERENCE  # that a key must have; None: any key will do
    public: bool = False  # no key is needed
    any_host: bool = False  # answers whatever the Host header says, as probes need it

    @property
    def prefix(self) -> str:
        """What comes before the parameter; the whole path where there is none."""
        return self.path.partition("{")[0]

    @property
    def suffix(self) -> str:
        """What comes after the parameter; empty where there is none."""
        return self.path.partition("}")[2]

    @property
    def path_names(self) -> list[str]:
        """The names of the path's parameters: at most two."""
        return re.findall(r"\{(\w+)\}", self.path)


class RouteTable:
    """Finds routes by exact path, then by two parameters, then by prefix and suffix, then by prefix."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._pairs: dict[tuple[str, str], dict[str, Route]] = {}  # by what is before and between two parameters
        patterns: dict[tuple[str, str], dict[str, Route]] = {}
        for route in routes:
            if len(route.path_names) == 2:
                between = route.suffix.partition("{")[0]
                self._pairs.setdefault((route.prefix, between), {})[route.method] = route
            elif route.path_names:
                patterns.setdefault((route.prefix, route.suffix), {})[route.method] = route
            else:
                self._exact.setdefault(route.path, {})[route.method] = route
        self._patterns = sorted(patterns.items(), key=lambda entry: -len(entry[0][1]))

    def find(self, method: str, path: str) -> Route:
        """The route. Raises HttpError 404 or 405; HEAD finds GET routes."""
        methods = self._methods_of(path)
        if methods is None:
            raise HttpError(404, f"Unknown path: {method} {path}. GET /openapi.json lists what there is.")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = self.allowed(path)
            raise HttpError(405, f"{method} is not allowed on {path}; use {allowed}.", headers={"allow": allowed})
        return route

    def allowed(self, path: str) -> str:
        """The methods of a path, as the Allow header lists them. Raises HttpError 404."""
        methods = self._methods_of(path)
        if methods is None:
            raise HttpError(404, f"Unknown path: {path}.")
        return ", ".join(sorted({*methods, "OPTIONS", *(("HEAD",) if "GET" in methods else ())}))

    def _methods_of(self, path: str) -> dict[str, Route] | None:
        exact = self._exact.get(path)
        if exact is not None:
            return exact
        for (prefix, between), methods in self._pairs.items():
            first, found, second = path.removeprefix(prefix).partition(between)
            if path.startswith(prefix) and first and found and second:
                return methods
        for (prefix, suffix), methods in self._patterns:
            if path.startswith(prefix) and path.endswith(suffix) and len(path) > len(prefix) + len(suffix):
                return methods
        return None
