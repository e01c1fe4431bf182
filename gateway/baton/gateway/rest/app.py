"""The REST application: assigns request ids, finds routes and turns errors into responses."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Coroutine, Sequence

from baton.gateway.access.credential import keys_in_headers
from baton.gateway.access.gate import Gate, OpenGate
from baton.gateway.access.identity import Scope
from baton.gateway.access.refusals import Refusals
from baton.gateway.errors.http import HttpError
from baton.gateway.http.cors import Cors
from baton.gateway.http.exchange import Exchange
from baton.gateway.http.host_check import HostCheck
from baton.gateway.memory import LARGE_BYTES, Trimmer
from baton.gateway.metrics.gateway import GatewayMetrics
from baton.gateway.rest.endpoint_load import REQUEST_HEADER, EndpointLoad
from baton.gateway.rest.query import check_query
from baton.gateway.rest.routing import Route, RouteTable
from baton.gateway.tracing.calls import trace_exchange
from baton.gateway.tracing.request import GatewayTracing
from baton.rpc.errors import ServiceError

_log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[!-~]{1,256}")


class App:
    """Dispatches requests to routes."""

    def __init__(
        self,
        routes: Sequence[Route],
        metrics: GatewayMetrics,
        gate: Gate | None = None,
        cors: Cors | None = None,
        tracing: GatewayTracing | None = None,
        hosts: HostCheck | None = None,
        load: EndpointLoad | None = None,
    ) -> None:
        self.table = RouteTable(routes)
        self._any_host = frozenset(route.path for route in routes if route.any_host)
        self._gate = gate or OpenGate()
        self._refusals = Refusals(self._gate)
        self._cors = cors or Cors()
        self._hosts = hosts or HostCheck()
        self._metrics = metrics
        self._load = load
        self._tracing = tracing
        self._trimmer = Trimmer()

    def __call__(self, exchange: Exchange) -> Coroutine[None, None, None] | None:
        """Answers at once, or returns a coroutine to await."""
        try:
            exchange.cors = self._cors.headers(exchange.headers)
            exchange.request_id = _request_id(exchange)
            if exchange.path not in self._any_host:
                self._hosts.check(exchange.headers, exchange.authority)
            self._cors.check(exchange.headers)
            if exchange.method == "OPTIONS":
                self._answer_options(exchange)
                return None
            route = self.table.find(exchange.method, exchange.path)
            self._count(exchange, route.path)
            if self._tracing is not None and route.method == "POST" and route.scope is Scope.INFERENCE:
                trace_exchange(self._tracing, exchange, route.path)
            if not route.public:
                exchange.identity = self._gate.identify(keys_in_headers(exchange.headers), route.scope)
            exchange.ignore(check_query(route, exchange.query))
            if exchange.num_body_bytes > LARGE_BYTES:
                exchange.on_end.append(lambda _: self._trimmer.trim_soon())
            if route.method == "POST" and route.scope is Scope.INFERENCE:
                exchange.on_end.append(self._count_refusal)
                if self._load is not None and REQUEST_HEADER in exchange.headers:
                    return self._finish(exchange, self._with_load(exchange, route, self._load))
                if self._refusals.must_check(exchange.identity, exchange.num_body_bytes):
                    return self._finish(exchange, self._check_first(exchange, route))
            work = route.handler(exchange)
        except Exception as error:
            self._fail(exchange, error)
            return None
        return None if work is None else self._finish(exchange, work)

    async def _with_load(self, exchange: Exchange, route: Route, load: EndpointLoad) -> None:
        form = exchange.headers[REQUEST_HEADER].decode("latin-1")
        exchange.load_headers = await load.header(form, exchange.identity)
        await self._check_first(exchange, route)

    async def _check_first(self, exchange: Exchange, route: Route) -> None:
        await self._refusals.check(exchange.identity)
        work = route.handler(exchange)
        if work is not None:
            await work

    def _count_refusal(self, exchange: Exchange) -> None:
        admitted = bool(exchange.limit_headers)
        self._refusals.count_response(exchange.identity, exchange.status, exchange.num_body_bytes, admitted)

    def _answer_options(self, exchange: Exchange) -> None:
        self._count(exchange, "OPTIONS")
        allowed = self.table.allowed(exchange.path)
        preflight = self._cors.preflight(exchange.headers, allowed)
        exchange.respond(204, headers={"allow": allowed, **preflight})

    async def _finish(self, exchange: Exchange, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Exception as error:
            self._fail(exchange, error)

    def _count(self, exchange: Exchange, route: str) -> None:
        exchange.on_end.append(
            lambda ended: self._metrics.request_answered(
                route, ended.method, ended.status, time.perf_counter() - ended.received
            )
        )

    def _fail(self, exchange: Exchange, error: Exception) -> None:
        if not exchange.on_end:
            self._count(exchange, "unknown")
        if not isinstance(error, ServiceError | HttpError):
            extra = {"request_id": exchange.request_id}
            _log.error("%s %s failed", exchange.method, exchange.path, exc_info=error, extra=extra)
        exchange.fail(error)


def _request_id(exchange: Exchange) -> str:
    given = exchange.headers.get(b"x-request-id")
    if given is None:
        return uuid.uuid4().hex
    text = given.decode("latin-1")
    if not _REQUEST_ID.fullmatch(text):
        raise HttpError(
            400, "invalid X-Request-Id; give 1 to 256 visible ASCII characters without spaces", param="x-request-id"
        )
    return text
