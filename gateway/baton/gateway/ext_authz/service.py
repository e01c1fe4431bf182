"""Implements envoy.service.auth.v3.Authorization, which Envoy calls before it forwards a request.

Checks keys, scopes and limits as the gateway behind Envoy does, but reserves nothing: the gateway checks the same key
again, reserves once it knows the request's size, and trusts none of Envoy's headers. So nothing counts twice, and a
client that bypasses Envoy gains nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import grpc
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.envoy import external_auth_pb2_grpc
from baton.envoy.external_auth_pb2 import CheckRequest, CheckResponse
from baton.gateway.access.credential import keys_in_headers
from baton.gateway.access.errors import RateLimited
from baton.gateway.access.gate import Gate
from baton.gateway.access.limits.usage import RequestCost
from baton.gateway.ext_authz.answers import allowed, denied, public
from baton.gateway.ext_authz.rules import RequestHead, Rules
from baton.gateway.http.cors import Cors
from baton.rpc.errors import ServiceError
from baton.rpc.server.server import Context, Service

# the least that any generation uses
_MINIMAL_COST = RequestCost(input_tokens=1, output_tokens=1, dry_run=True)
_KEY_HEADERS = ("authorization", "x-api-key")


class ExtAuthzServicer(external_auth_pb2_grpc.AuthorizationServicer):
    """Decides by a gate. `answers` counts: allowed, public, denied, limited, failed."""

    def __init__(self, gate: Gate, rules: Rules, cors: Cors | None = None) -> None:
        self._cors = cors or Cors()
        self._gate = gate
        self._rules = rules
        self.answers: Counter[str] = Counter()

    async def Check(self, request: CheckRequest, context: Context) -> CheckResponse:  # noqa: N802
        http = request.attributes.request.http
        head = RequestHead(http.method, http.path, http.headers)
        try:
            response, answer = await self._check(head)
        except RateLimited as error:
            response, answer = self._denied(head, error), "limited"
        except ServiceError as error:
            if error.code is grpc.StatusCode.UNAVAILABLE:
                # Envoy gets no answer, and asks another gateway or reports that it cannot decide.
                self.answers["failed"] += 1
                raise
            response, answer = self._denied(head, error), "denied"
        self.answers[answer] += 1
        return response

    def _denied(self, head: RequestHead, error: ServiceError) -> CheckResponse:
        origin = head.headers.get("origin")
        return denied(head, error, self._cors.headers({} if origin is None else {b"origin": origin.encode()}))

    async def _check(self, head: RequestHead) -> tuple[CheckResponse, str]:
        requirement = self._rules.requirement_of(head)
        if requirement.public:
            return public(), "public"
        identity = self._gate.identify(keys_in_headers(_key_headers(head.headers)), requirement.scope)
        if requirement.limited:
            await self._gate.admit(identity, _MINIMAL_COST)
        return allowed(identity), "allowed"


class ExtAuthzCollector(Collector):
    """Exports the answers to Prometheus."""

    def __init__(self, servicer: ExtAuthzServicer) -> None:
        self._servicer = servicer

    def collect(self) -> Iterable[Metric]:
        text = "Checks by Envoy, by answer."
        family = CounterMetricFamily("baton_gateway_ext_authz_checks", text, labels=["answer"])
        for answer, count in self._servicer.answers.items():
            family.add_metric([answer], count)
        yield family


def ext_authz_service(servicer: ExtAuthzServicer) -> Service:
    """Returns the servicer as a service to register."""
    register = external_auth_pb2_grpc.add_AuthorizationServicer_to_server
    return Service("envoy.service.auth.v3.Authorization", servicer, register)


def _key_headers(headers: Mapping[str, str]) -> dict[bytes, bytes]:
    """Returns the key headers in the form of the gateway's REST server."""
    return {name.encode(): headers[name].encode() for name in _KEY_HEADERS if name in headers}
