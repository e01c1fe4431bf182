"""Errors in OpenAI's format: {"error": {message, type, param, code}}, with a status and headers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus

import grpc
import orjson

from baton.gateway.access.errors import RateLimited, Unauthenticated
from baton.gateway.access.identity import MissingScope
from baton.rpc.errors import InvalidRequest, NotFound, ServiceError, Unsupported, shortened
from baton.v1 import types_pb2

DEFAULT_RETRY_AFTER_SECONDS = 1

_WORKER_FIELDS: Mapping[str, str] = {
    f"{prefix}.{name}": name
    for prefix, kind in (("sampling", types_pb2.SamplingParams), ("stop", types_pb2.StopConditions))
    for name in kind.DESCRIPTOR.fields_by_name
} | {"sampling.extra_args": "vllm_xargs"}

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
# Statuses that the HTTP standard does not define.
_PHRASES: Mapping[int, str] = {499: "Client Closed Request", 529: "Overloaded"}
_CODES: Mapping[int, str] = {429: "rate_limit_exceeded", 503: "service_unavailable", 504: "timeout"}


class ContextTooLong(InvalidRequest):
    """The prompt and its output exceed the model's context. Clients look for the code of this error."""


class ToolServerFailed(ServiceError):
    """A server of tools that the request names does not answer as it should."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class HttpError(Exception):
    """An HTTP error response, also for errors that exist only in HTTP: unknown path, body too large, timeout.

    Long messages, which quote what the client sent, are cut.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = shortened(message)
        self.param = None if param is None else shortened(param)
        self.code = code
        self.headers = dict(headers or {})
        self._kind = kind  # None: derived from the status

    @property
    def type(self) -> str:
        """Returns OpenAI's error type."""
        return self._kind or _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def body(self) -> bytes:
        """Returns the JSON body."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


def http_error_of(error: Exception) -> HttpError:
    """Returns the response for an exception. Hides the details of internal errors."""
    if isinstance(error, HttpError):
        return error
    if not isinstance(error, ServiceError):
        return HttpError(500, "The gateway failed on this request; its log says why, by the request id.")
    if isinstance(error, RateLimited):
        headers = {**error.limit_headers, **error.headers}
        return HttpError(429, error.message, code=error.openai_code, headers=headers, kind=error.openai_type)
    if isinstance(error, Unauthenticated):
        headers, code = {"www-authenticate": "Bearer"}, "invalid_api_key"
        return HttpError(401, error.message, code=code, headers=headers, kind="invalid_request_error")
    if isinstance(error, ToolServerFailed):
        return HttpError(424, error.message, param=error.field, code="http_error", kind="external_connector_error")
    if isinstance(error, MissingScope):
        return HttpError(403, error.message, code="missing_scope")
    # The client should leave out a named field that this fleet does not support, and clients retry a 501: hence 400.
    status = 400 if isinstance(error, Unsupported) and error.field else error.http_status
    headers = {"retry-after": str(_retry_seconds(error))} if status in (429, 503) else {}
    return HttpError(status, error.message, param=_param_of(error), code=_code_of(error), headers=headers)


def reason_phrase(status: int) -> str:
    """Returns the reason phrase of the status line."""
    return _PHRASES.get(status) or HTTPStatus(status).phrase


def _param_of(error: ServiceError) -> str | None:
    """Returns REST's name of the field. Workers report paths in their own messages."""
    return _WORKER_FIELDS.get(error.field, error.field) or None


def _code_of(error: ServiceError) -> str | None:
    if isinstance(error, ContextTooLong):
        return "context_length_exceeded"
    if isinstance(error, NotFound) and error.field == "model":
        return "model_not_found"
    return _CODES.get(error.http_status)


def _retry_seconds(error: ServiceError) -> int:
    if error.retry_after_ms is None:
        return DEFAULT_RETRY_AFTER_SECONDS
    return max(1, math.ceil(error.retry_after_ms / 1000))
