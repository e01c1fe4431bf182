"""Errors in Anthropic's format: {"type": "error", "error": {type, message}}, with Anthropic's status codes."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from baton.gateway.errors.http import HttpError

PATH_PREFIX = "/v1/messages"
MODELS = "/v1/models"  # also a path of OpenAI's API

# Anthropic uses 529 (overloaded) for a temporary failure where others use 503.
_STATUSES: Mapping[int, int] = {503: 529}
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class AnthropicError(HttpError):
    """An error in Anthropic's format.

    The message names the wrong field, because the format has no other place for it.
    """

    def __init__(self, error: HttpError, request_id: str) -> None:
        param = error.param
        message = error.message if not param or param in error.message else f"{param}: {error.message}"
        status = _STATUSES.get(error.status, error.status)
        super().__init__(status, message, param=param, code=error.code, headers=error.headers)
        self._request_id = request_id

    @property
    def type(self) -> str:
        """Returns Anthropic's error type for the status."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")

    @property
    def body(self) -> bytes:
        """Returns the JSON body."""
        error = {"type": self.type, "message": self.message}
        return orjson.dumps({"type": "error", "error": error, "request_id": self._request_id or None})


def asks_for_anthropic(path: str, headers: Mapping[bytes, bytes]) -> bool:
    """Returns whether a request is for Anthropic's API. The paths that OpenAI's API shares are decided by a header."""
    shared = path == MODELS or path.startswith(f"{MODELS}/")
    return speaks_anthropic(path) or (shared and b"anthropic-version" in headers)


def speaks_anthropic(path: str) -> bool:
    """Returns whether the path belongs to Anthropic's API only."""
    return path == PATH_PREFIX or path.startswith(f"{PATH_PREFIX}/")
