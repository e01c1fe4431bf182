"""The access log of REST and gRPC: one line per response, without text, keys or query strings of clients."""

from __future__ import annotations

import logging
import re
from typing import Any

NAME = "baton.gateway.access"

_log = logging.getLogger(NAME)

# Paths that probes and scrapers request continuously.
_QUIET_PATHS = frozenset(("/health", "/ping", "/ready", "/load", "/metrics"))
_REQUEST_ID = re.compile(r"[!-~]{1,256}")
_MAX_PATH = 200


def switch_access_log(enabled: bool) -> None:
    _log.disabled = not enabled


def log_exchange(method: str, path: str, status: int, **facts: Any) -> None:
    """Logs a REST response. `path` has no query."""
    level = logging.DEBUG if path in _QUIET_PATHS else logging.INFO
    if _log.isEnabledFor(level):
        _log.log(level, "%s %s %d", method, _shown(path), status, extra=_extra(**facts))


def log_call(method: str, outcome: str, **facts: Any) -> None:
    """Logs the outcome of a gRPC call."""
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s %s", method, outcome, extra=_extra(**facts))


def is_request_id(text: str) -> bool:
    """Returns whether a client's request id may appear in logs and headers.

    Others may hold log lines, prompts or keys.
    """
    return _REQUEST_ID.fullmatch(text) is not None


def rpc_client(peer: str) -> str:
    """Returns the address in gRPC's `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`, in the form of REST's log lines."""
    return peer.partition(":")[2].replace("%5B", "[").replace("%5D", "]") or peer


def _extra(request_id: str, tenant: str, client: str, seconds: float, num_bytes: int | None = None) -> dict[str, Any]:
    known = not request_id or is_request_id(request_id)
    extra: dict[str, Any] = {
        "request_id": request_id if known else "invalid",
        "tenant": tenant,
        "client": client,
        "milliseconds": round(seconds * 1000, 1),
    }
    return extra if num_bytes is None else {**extra, "bytes": num_bytes}


def _shown(path: str) -> str:
    """Returns the path as one line of printable ASCII, truncated if it is long."""
    return path[:_MAX_PATH].encode("unicode_escape").decode() + ("..." if len(path) > _MAX_PATH else "")
