"""Routes, and the table that finds the route of a request."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from baton.gateway.access.identity import Scope
from baton.gateway.errors.http import HttpError
from baton.gateway.http.exchange import Exchange
from baton.gateway.rest.likely_path import likely_path

_SHOWN = 200  # characters of an unknown path in an error

ANY_ID = ".+"

Handler = Callable[[Exchange], Coroutine[None, None, None] | None]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a route. `schema` is JSON Schema."""

    name: str
    summary: str
    schema: Mapping[str, Any]
    place: str = "query"  # query or header
    style: str = ""  # OpenAPI's style; empty: the default of its place
    nested: bool = False  # whether name[] and name[key] are accepted too
    ignored: bool = False  # whether it is ignored and listed in x-baton-ignored


# Azure's clients add it to every request. It is ignored.
API_VERSION = Parameter("api-version", "A date; accepted and ignored.", {"type": "string"})
INCLUDE = Parameter("include", "Accepted and ignored.", {}, nested=True, ignored=True)


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path.

    A `{name}` at the end of a path matches everything that follows, including slashes; elsewhere it matches what is
    between. `ids` is a regular expression for the first one's value.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    request: type[Struct] | None = None
    response: type[Struct] | None = None  # None: not JSON
    other_response: type[Struct] | None = None  # a second form of it, which a field asks for
    chunk: type[Struct] | None = None  # of the event stream for `stream: true`
    body_type: str = "application/json"  # of the request
    content_type: str = "application/json"
    errors: tuple[int, ...] = ()  # statuses besides 200 and those of every route
    parameters: tuple[Parameter, ...] = ()
    ids: str = ANY_ID
    anthropic: type[Struct] | None = None  # the response to requests with Anthropic-Version
    scope: Scope | None = Scope.INFERENCE  # required scope of the key; None: any valid key
    public: bool = False  # whether no key is needed
    any_host: bool = False  # whether any Host header is accepted, as probes need

    @property
    def path_names(self) -> list[str]:
        """Returns the names of the path's parameters, at most two."""
        return re.findall(r"\{(\w+)\}", self.path)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The routes of one path with parameters."""

    expression: re.Pattern[str]
    methods: dict[str, Route]


class RouteTable:
    """Finds routes by exact path, then by the pattern with the most literal text."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        patterns: dict[tuple[str, str], _Pattern] = {}
        for route in routes:
            if route.path_names:
                pattern = patterns.setdefault((route.path, route.ids), _Pattern(_expression(route), {}))
                pattern.methods[route.method] = route
            else:
                self._exact.setdefault(route.path, {})[route.method] = route
        fixed = {key: len(re.sub(r"\{\w+\}", "", key[0])) for key in patterns}
        self._patterns = [patterns[key] for key in sorted(patterns, key=lambda key: -fixed[key])]

    def find(self, method: str, path: str) -> Route:
        """Returns the route. Raises HttpError 404 or 405. HEAD matches GET routes."""
        methods = self._methods_of(path)
        if methods is None:
            raise HttpError(404, f"Unknown path: {method} {path[:_SHOWN]}. {self._advice(path)}")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = self.allowed(path)
            raise HttpError(405, f"{method} is not allowed on {path}; use {allowed}", headers={"allow": allowed})
        return route

    def allowed(self, path: str) -> str:
        """Returns the value of a path's Allow header. Raises HttpError 404."""
        methods = self._methods_of(path)
        if methods is None:
            raise HttpError(404, f"Unknown path: {path[:_SHOWN]}. {self._advice(path)}")
        return ", ".join(sorted({*methods, "OPTIONS", *(("HEAD",) if "GET" in methods else ())}))

    def _advice(self, path: str) -> str:
        likely = likely_path(path, lambda candidate: self._methods_of(candidate) is not None, self._exact)
        return f"Did you mean {likely}?" if likely else "GET /openapi.json lists all paths."

    def _methods_of(self, path: str) -> dict[str, Route] | None:
        exact = self._exact.get(path)
        if exact is not None:
            return exact
        return next((one.methods for one in self._patterns if one.expression.fullmatch(path)), None)


def _expression(route: Route) -> re.Pattern[str]:
    """Returns a regex of the paths that the route matches."""
    first, *more = map(re.escape, re.split(r"\{\w+\}", route.path))
    ids = (route.ids, ANY_ID)[: len(more)]
    return re.compile(first + "".join(f"(?:{one}){text}" for one, text in zip(ids, more, strict=True)), re.DOTALL)
