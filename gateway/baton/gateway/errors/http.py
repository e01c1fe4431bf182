"""Errors as OpenAI's clients know them: {"error": {message, type, param, code}}, a status and headers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus

import orjson

from baton.gateway.access.errors import RateLimited, Unauthenticated
from baton.gateway.access.identity import MissingScope
from baton.rpc.errors import InvalidRequest, NotFound, ServiceError, Unsupported
from baton.v1 import types_pb2

DEFAULT_RETRY_AFTER_SECONDS = 1

_WORKER_FIELDS: Mapping[str, str] = {
    f"{prefix}.{name}": name
    for prefix, kind in (("sampling", types_pb2.SamplingParams), ("stop", types_pb2.StopConditions))
    for name in kind.DESCRIPTOR.fields_by_name
}

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
# Of statuses that are no standard.
_PHRASES: Mapping[int, str] = {499: "Client Closed Request", 529: "Overloaded"}
_CODES: Mapping[int, str] = {429: "rate_limit_exceeded", 503: "service_unavailable", 504: "timeout"}


class ContextTooLong(InvalidRequest):
    """Prompt and answer do not fit the model's context; clients look for this error's code."""


class HttpError(Exception):
    """An answer that only HTTP knows: no such path, body too large, too slow."""

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
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self._kind = kind  # None: as the status tells

    @property
    def type(self) -> str:
        """OpenAI's word for the kind of error."""
        return self._kind or _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def body(self) -> bytes:
        """The JSON document."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


def http_error_of(error: Exception) -> HttpError:
    """What a client is told of an exception. Nothing of a defect but that there is one."""
    if isinstance(error, HttpError):
        return error
    if not isinstance(error, ServiceError):
        return HttpError(500, "The gateway failed on this request; its log says why, by the request id.")
    if isinstance(error, RateLimited):
        headers = {**error.standing, **error.headers}
        return HttpError(429, error.message, code=error.openai_code, headers=headers, kind=error.openai_type)
    if isinstance(error, Unauthenticated):
        headers, code = {"www-authenticate": "Bearer"}, "invalid_api_key"
        return HttpError(401, error.message, code=code, headers=headers, kind="invalid_request_error")
    if isinstance(error, MissingScope):
        return HttpError(403, error.message, code="missing_scope")
    # What this fleet cannot serve, named by its field, is for the client to leave out; clients try a 501 again.
    status = 400 if isinstance(error, Unsupported) and error.field else error.http_status
    headers = {"retry-after": str(_retry_seconds(error))} if status in (429, 503) else {}
    return HttpError(status, error.message, param=_param_of(error), code=_code_of(error), headers=headers)


def reason_phrase(status: int) -> str:
    """The words after the number in the status line."""
    return _PHRASES.get(status) or HTTPStatus(status).phrase


def _param_of(error: ServiceError) -> str | None:
    """Workers name fields of messages that REST's clients do not know."""
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
