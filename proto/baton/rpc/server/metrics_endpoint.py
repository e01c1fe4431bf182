"""Serves a process's Prometheus metrics: one HTTP endpoint for the lifetime of an `async with`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client

from baton.rpc.address import is_loopback, split_address
from baton.rpc.errors import Unavailable
from baton.rpc.identity.table import METRICS_READERS
from baton.rpc.server.hosts import HostRule
from baton.rpc.tls.credentials import Tls

_log = logging.getLogger(__name__)

_CLIENT_SECONDS = 10.0  # for a handshake, and between a client's bytes
_MAX_CLIENTS = 64


@contextlib.asynccontextmanager
async def metrics_endpoint(
    listen: str, registry: prometheus_client.CollectorRegistry, tls: Tls | None = None
) -> AsyncIterator[int]:
    """Serves `registry`, and the process's own figures, at `listen`/metrics; yields the port. Empty: off, 0.

    With `tls` over HTTPS, to operators of the fleet; with the files as they are when a client connects.
    """
    if not listen:
        yield 0
        return
    host, port = split_address(listen, "metrics_listen")
    prometheus_client.ProcessCollector(registry=registry)
    kind = _ServerOfSix if ":" in host else _Server
    try:
        server = kind((host.strip("[]"), port), tls)
    except OSError as error:
        raise Unavailable(f"cannot listen on metrics_listen={listen}: {error.strerror}") from error
    app = prometheus_client.make_wsgi_app(registry)
    # Beyond loopback, readers come by service names that are not known here.
    server.set_app(_for_own_hosts(app, HostRule()) if tls is None and is_loopback(host) else app)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()


def _for_own_hosts(app: Any, rule: HostRule) -> Any:
    """Serves requests whose Host header is an IP address or localhost, so that no page can read it by DNS rebinding."""

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if not rule.accepts(environ.get("HTTP_HOST", "localhost").encode("latin-1", errors="replace")):
            start_response("403 Forbidden", [("content-type", "text/plain; charset=utf-8")])
            return [b"This host name is not served here: use an IP address or localhost.\n"]
        answer: Iterable[bytes] = app(environ, start_response)
        return answer

    return guarded


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing, because metrics are requested every few seconds."""

    def address_string(self) -> str:
        """Asks no name server."""
        return str(self.client_address[0])


class _Server(ThreadingMixIn, WSGIServer):
    """Uses a thread for each client, so that a stalled handshake does not delay others."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = _MAX_CLIENTS

    def __init__(self, address: tuple[str, int], tls: Tls | None) -> None:
        self._tls = tls
        self._slots = threading.BoundedSemaphore(_MAX_CLIENTS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Skips the look-up of this host's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Returns False, which closes the connection, if there are too many."""
        return self._slots.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Completes one client's handshake, answers it, and closes."""
        try:
            request.settimeout(_CLIENT_SECONDS)
            if self._tls is not None and (request := self._greeted(request, client_address, self._tls)) is None:
                return
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that break off."""
        _log.debug("a reader of metrics broke off", exc_info=True)

    def _greeted(self, request: Any, client_address: Any, tls: Tls) -> Any:
        """Returns the connection after its handshake, or None if it was closed."""
        try:
            connection = tls.ssl_context(server_side=True).wrap_socket(request, server_side=True)
        except OSError as error:
            _log.warning("metrics: the handshake with %s failed: %s", client_address[0], error)
            self.shutdown_request(request)
            return None
        if problem := tls.refusal(connection.getpeercert(), METRICS_READERS):
            tls.refusals["/metrics"] += 1
            _log.warning("metrics refused to %s: %s", client_address[0], problem)
            self.shutdown_request(connection)
            return None
        return connection


class _ServerOfSix(_Server):
    address_family = socket.AF_INET6
