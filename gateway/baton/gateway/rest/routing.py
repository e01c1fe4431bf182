"""What a route is, and the table that finds one for a request."""

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
    """A parameter that the client may give; `schema` is JSON Schema."""

    name: str
    summary: str
    schema: Mapping[str, Any]
    place: str = "query"  # or header
    style: str = ""  # of OpenAPI; empty: that of its place
    nested: bool = False  # also as name[] and name[key]
    ignored: bool = False  # it changes nothing; the answer's x-baton-ignored lists it


# Clients of Azure add it to every request. It changes nothing.
API_VERSION = Parameter("api-version", "A date, which changes nothing.", {"type": "string"})
INCLUDE = Parameter("include", "Accepted and ignored.", {}, nested=True, ignored=True)


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path.

    A path that ends in `{name}` takes whatever follows, slashes included; a `{name}` before more path takes what
    comes in between. `ids` is a regular expression for the value of the first.
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
    ids: str = ANY_ID
    anthropic: type[Struct] | None = None  # the response where Anthropic-Version is sent
    scope: Scope | None = Scope.INFERENCE  # that a key must have; None: any key will do
    public: bool = False  # no key is needed
    any_host: bool = False  # answers whatever the Host header says, as probes need it

    @property
    def path_names(self) -> list[str]:
        """The names of the path's parameters: at most two."""
        return re.findall(r"\{(\w+)\}", self.path)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The routes of one path with parameters."""

    expression: re.Pattern[str]
    methods: dict[str, Route]


class RouteTable:
    """Finds routes by exact path, then by the path with the most text around its parameters."""

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
        """The route. Raises HttpError 404 or 405; HEAD finds GET routes."""
        methods = self._methods_of(path)
        if methods is None:
            raise HttpError(404, f"Unknown path: {method} {path[:_SHOWN]}. {self._advice(path)}")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = self.allowed(path)
            raise HttpError(405, f"{method} is not allowed on {path}; use {allowed}.", headers={"allow": allowed})
        return route

    def allowed(self, path: str) -> str:
        """The methods of a path, as the Allow header lists them. Raises HttpError 404."""
        methods = self._methods_of(path)
        if methods is None:
            raise HttpError(404, f"Unknown path: {path[:_SHOWN]}. {self._advice(path)}")
        return ", ".join(sorted({*methods, "OPTIONS", *(("HEAD",) if "GET" in methods else ())}))

    def _advice(self, path: str) -> str:
        likely = likely_path(path, lambda candidate: self._methods_of(candidate) is not None, self._exact)
        return f"Did you mean {likely}?" if likely else "GET /openapi.json lists what there is."

    def _methods_of(self, path: str) -> dict[str, Route] | None:
        exact = self._exact.get(path)
        if exact is not None:
            return exact
        return next((one.methods for one in self._patterns if one.expression.fullmatch(path)), None)


def _expression(route: Route) -> re.Pattern[str]:
    """Of the paths that the route answers."""
    first, *more = map(re.escape, re.split(r"\{\w+\}", route.path))
    ids = (route.ids, ANY_ID)[: len(more)]
    return re.compile(first + "".join(f"(?:{one}){text}" for one, text in zip(ids, more, strict=True)), re.DOTALL)
