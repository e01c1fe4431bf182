"""What a request needs before Envoy lets it through, told by its head: the gateway's own rules. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from baton.gateway.access.identity import Scope
from baton.gateway.access.rpc_guard import is_open, scope_of
from baton.gateway.errors.http import HttpError
from baton.gateway.rest.routing import Route, RouteTable

# Methods that run generations.
_LIMITED = frozenset(f"/baton.v1.InferenceService/{name}" for name in ("Generate", "CreateResponse"))


@dataclass(frozen=True, slots=True)
class Need:
    """What one request needs."""

    public: bool = False  # no key
    scope: Scope | None = None  # that a key must have; None: any key will do
    limited: bool = False  # it counts against its tenant's limits


@dataclass(frozen=True, slots=True)
class Head:
    """A request without its body. Header names are lower case."""

    method: str
    target: str  # path and query
    headers: Mapping[str, str]

    @property
    def path(self) -> str:
        """Without the query."""
        return self.target.partition("?")[0].partition("#")[0]

    @property
    def is_grpc(self) -> bool:
        """Whether the client waits for a gRPC status. Envoy has turned gRPC-Web into gRPC by now."""
        return self.headers.get("content-type", "").lower().startswith("application/grpc")


class Rules:
    """The routes of REST, and the services of gRPC."""

    def __init__(self, table: RouteTable) -> None:
        self._table = table

    def need_of(self, head: Head) -> Need:
        """What is not known needs a key too: nothing but what is told to be public passes without one."""
        path = head.path
        try:
            if head.method == "OPTIONS":
                self._table.allowed(path)
                return Need(public=True)
            route = self._table.find(head.method, path)
        except HttpError:
            return _need_of_method(path)
        return Need(route.public, route.scope, _is_limited(route))


def _need_of_method(path: str) -> Need:
    """Of a gRPC method, or of what nobody serves."""
    service = path.rpartition("/")[0].removeprefix("/")
    return Need(is_open(service), scope_of(service), path in _LIMITED)


def _is_limited(route: Route) -> bool:
    """Routes that run generations say that they may answer with 429."""
    return HTTPStatus.TOO_MANY_REQUESTS in route.errors
