"""Cross-origin resource sharing (CORS): response headers for browsers, and refusal of foreign pages. Knows no routes.

Credentials are never allowed: the gateway reads no cookies, and pages send their key themselves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from baton.gateway.errors.http import HttpError
from baton.gateway.http.ignored_fields import HEADER as IGNORED
from baton.rpc.address import is_loopback
from baton.rpc.errors import InvalidRequest

ANY_ORIGIN = "*"
EXPOSED = (
    "x-request-id",
    "request-id",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    IGNORED,
    *(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
    *(
        f"anthropic-ratelimit-{of}-{what}"
        for of in ("requests", "input-tokens", "output-tokens")
        for what in ("limit", "remaining", "reset")
    ),
)

_MAX_AGE_SECONDS = 600
_VARY = "origin, access-control-request-method, access-control-request-headers"
_HOST = r"(?:[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9])?|\[[0-9a-f:.]+\])"
_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://{_HOST}(?::[1-9][0-9]{{0,4}})?")
_HEADER_NAMES = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+(?: *, *[!#$%&'*+.^_`|~0-9a-z-]+)*")
_MAX_NAMES_BYTES = 2048
_DEFAULT_PORTS = {"http": 80, "https": 443}
_NOTHING: Mapping[str, str] = {}


def check_origins(origins: Collection[str]) -> None:
    """Raises InvalidRequest for a text that no browser sends as an origin."""
    for origin in origins:
        if origin != ANY_ORIGIN and not _is_origin(origin):
            raise InvalidRequest(
                f"cors_origins: {origin!r} is not an origin; give scheme://host or scheme://host:port in lower case "
                "without path, trailing slash or default port, or * alone for all",
                field="cors_origins",
            )
    if ANY_ORIGIN in origins and set(origins) != {ANY_ORIGIN}:
        raise InvalidRequest(
            "cors_origins has * and other origins; give * alone, or leave it out", field="cors_origins"
        )


class Cors:
    """The rules of one gateway. `refuses_strangers` refuses requests of pages from unnamed origins.

    This protects a gateway without keys: its operator may have foreign pages open in a browser that reaches the
    gateway, and these could send requests although they cannot read the responses.
    """

    def __init__(self, origins: Collection[str] = (), refuses_strangers: bool = False) -> None:
        self._origins = frozenset(origins)
        self._any = ANY_ORIGIN in self._origins
        self._refuses_strangers = refuses_strangers
        self._exposed = ", ".join(EXPOSED)

    def headers(self, request: Mapping[bytes, bytes]) -> Mapping[str, str]:
        """Returns the CORS headers of the response to a request. Names of request headers are lower-case."""
        if not self._origins:
            return _NOTHING
        if self._any:
            return {"access-control-allow-origin": ANY_ORIGIN, "access-control-expose-headers": self._exposed}
        origin = _text(request.get(b"origin", b""))
        if origin not in self._origins:
            return {"vary": "origin"}
        return {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": self._exposed,
            "vary": "origin",
        }

    def preflight(self, request: Mapping[bytes, bytes], allowed_methods: str) -> Mapping[str, str]:
        """Returns the additional headers of an OPTIONS response; empty if the page is not allowed or it is no
        preflight.
        """
        if b"access-control-request-method" not in request or not self._allows(request):
            return _NOTHING
        answer = {
            "access-control-allow-methods": allowed_methods,
            "access-control-max-age": str(_MAX_AGE_SECONDS),
            "vary": _VARY,
        }
        names = _text(request.get(b"access-control-request-headers", b"")).lower()
        if len(names) <= _MAX_NAMES_BYTES and _HEADER_NAMES.fullmatch(names):
            # Lists the requested names, because `*` does not include authorization.
            answer["access-control-allow-headers"] = names
        return answer

    def check(self, request: Mapping[bytes, bytes]) -> None:
        """Raises HttpError 403 for a page that may not send requests. The Host header was checked before."""
        if not self._refuses_strangers or b"origin" not in request or self._allows(request):
            return
        origin = _text(request[b"origin"])
        if not _is_loopback_origin(origin) and not _is_own_origin(origin, _text(request.get(b"host", b""))):
            raise HttpError(
                403,
                f"pages of {origin[:256]!r} may not use this gateway, which requires no API key; name the origin in "
                "--cors-origins, or set --api-keys",
                kind="permission_error",
                code="origin_not_allowed",
            )

    def _allows(self, request: Mapping[bytes, bytes]) -> bool:
        return self._any or _text(request.get(b"origin", b"")) in self._origins


def _is_origin(text: str) -> bool:
    if not _ORIGIN.fullmatch(text):
        return False
    try:
        parts = urlsplit(text)
        return parts.port is None or parts.port != _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return False


def _is_loopback_origin(origin: str) -> bool:
    """Returns whether the origin's pages come from this machine."""
    if not _ORIGIN.fullmatch(origin):
        return False
    try:
        host = urlsplit(origin).hostname or ""
    except ValueError:
        return False
    return is_loopback(host) or host.endswith(".localhost")


def _is_own_origin(origin: str, host: str) -> bool:
    """Returns whether the page came from this gateway, under the host name of the request."""
    return bool(host) and origin.partition("://")[2] == host.lower()


def _text(value: bytes) -> str:
    return value.decode("latin-1")
