"""What a request needs to pass Envoy, derived from its head by the gateway's own routes. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from baton.gateway.access.identity import Scope
from baton.gateway.access.rpc_guard import is_open, scope_of
from baton.gateway.errors.http import HttpError
from baton.gateway.rest.routing import Route, RouteTable

# Methods that run models.
_RUNNING = ("Generate", "CreateResponse", "Embed", "Score", "Rerank", "Classify", "Pool")
_LIMITED = frozenset(f"/baton.v1.InferenceService/{name}" for name in _RUNNING)


@dataclass(frozen=True, slots=True)
class Requirement:
    """The requirements of one request."""

    public: bool = False  # whether no key is needed
    scope: Scope | None = None  # required scope of the key; None: any valid key
    limited: bool = False  # whether it counts against the tenant's limits


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request without its body. Header names are lower-case."""

    method: str
    target: str  # path and query
    headers: Mapping[str, str]

    @property
    def path(self) -> str:
        """Returns the path without the query."""
        return self.target.partition("?")[0].partition("#")[0]

    @property
    def is_grpc(self) -> bool:
        """Returns whether the client expects a gRPC status. Envoy has already converted gRPC-Web to gRPC."""
        return self.headers.get("content-type", "").lower().startswith("application/grpc")


class Rules:
    """The requirements by REST route and gRPC service."""

    def __init__(self, table: RouteTable) -> None:
        self._table = table

    def requirement_of(self, head: RequestHead) -> Requirement:
        """Returns a request's requirements. An unknown path needs a key too: only public routes pass without one."""
        path = head.path
        try:
            if head.method == "OPTIONS":
                self._table.allowed(path)
                return Requirement(public=True)
            route = self._table.find(head.method, path)
        except HttpError:
            return _requirement_of_method(path)
        return Requirement(route.public, route.scope, _is_limited(route))


def _requirement_of_method(path: str) -> Requirement:
    """Returns the requirements of a gRPC method or of an unknown path."""
    service = path.rpartition("/")[0].removeprefix("/")
    return Requirement(is_open(service), scope_of(service), path in _LIMITED)


def _is_limited(route: Route) -> bool:
    """Returns whether a route runs generations: those declare 429 among their errors."""
    return HTTPStatus.TOO_MANY_REQUESTS in route.errors
