"""Responses to Envoy: allowed requests with their identity, and denials with the client's error. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from google.rpc import code_pb2
from grpc_status import rpc_status

from baton.envoy.external_auth_pb2 import CheckResponse, DeniedHttpResponse, OkHttpResponse, Status
from baton.envoy.header_value_pb2 import HeaderValue, HeaderValueOption
from baton.envoy.http_status_pb2 import HttpStatus, StatusCode
from baton.gateway.access.identity import Identity
from baton.gateway.errors.anthropic import AnthropicError, speaks_anthropic
from baton.gateway.errors.http import http_error_of
from baton.gateway.ext_authz.rules import RequestHead
from baton.rpc.errors import ServiceError, status_of

# The identity of a request, for logs and for services behind Envoy. Baton's gateway checks the key and ignores these
# headers, so a client that bypasses Envoy gains nothing from them.
TENANT_HEADER = "x-baton-tenant"
KEY_HEADER = "x-baton-key-id"

_DETAILS = "grpc-status-details-bin"


def public() -> CheckResponse:
    """Returns a response that allows a request without an identity."""
    ok = OkHttpResponse(headers_to_remove=[TENANT_HEADER, KEY_HEADER])
    return CheckResponse(status=Status(code=code_pb2.OK), ok_response=ok)


def allowed(identity: Identity) -> CheckResponse:
    """Returns a response that allows a request and replaces the identity headers by the key's."""
    headers = {TENANT_HEADER: identity.tenant.name, KEY_HEADER: identity.key_id}
    ok = OkHttpResponse(headers=_options(headers))
    return CheckResponse(status=Status(code=code_pb2.OK), ok_response=ok)


def denied(head: RequestHead, error: ServiceError, cors: Mapping[str, str]) -> CheckResponse:
    """Returns a response that denies a request in the client's protocol. `cors` headers are added for REST."""
    response = _denied_grpc(error) if head.is_grpc else _denied_rest(head, error, cors)
    return CheckResponse(status=Status(code=error.code.value[0]), denied_response=response)


def _denied_rest(head: RequestHead, error: ServiceError, cors: Mapping[str, str]) -> DeniedHttpResponse:
    answer, request_id = http_error_of(error), head.headers.get("x-request-id", "")
    headers = {"content-type": "application/json", **cors}
    if request_id:
        headers["x-request-id"] = request_id
    if speaks_anthropic(head.path):
        answer = AnthropicError(answer, request_id)
        headers["request-id"] = request_id
    headers.update(answer.headers)
    return DeniedHttpResponse(status=_status(answer.status), headers=_options(headers), body=answer.body.decode())


def _denied_grpc(error: ServiceError) -> DeniedHttpResponse:
    """Returns a denial for gRPC: Envoy takes grpc-status from the headers and the message from the body."""
    headers = {"grpc-status": str(error.code.value[0])}
    for name, value in rpc_status.to_status(status_of(error)).trailing_metadata or ():
        if name == _DETAILS:
            headers[name] = _base64(value)
    return DeniedHttpResponse(status=_status(error.http_status), headers=_options(headers), body=error.message)


def _status(status: int) -> HttpStatus:
    return HttpStatus(code=StatusCode.ValueType(status))


def _base64(value: str | bytes) -> str:
    data = value.encode() if isinstance(value, str) else value
    return base64.b64encode(data).decode().rstrip("=")


def _options(headers: Mapping[str, str]) -> list[HeaderValueOption]:
    action = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return [
        HeaderValueOption(header=HeaderValue(key=name, value=value), append_action=action)
        for name, value in headers.items()
        if value
    ]
