"""Sends batches of spans to a collector: OTLP over gRPC, or over HTTP in protobuf."""

from __future__ import annotations

import asyncio
import http.client
import ssl
import urllib.parse
from dataclasses import dataclass
from typing import Protocol, Self

import grpc

from baton.otlp.v1 import trace_pb2 as pb
from baton.rpc.errors import InvalidRequest, problem_of

_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_SHOWN = 200  # characters of an answer, in logs


class ExportFailed(Exception):
    """A batch was not accepted. The message says why."""


class Exporter(Protocol):
    """One collector. Calls do not overlap."""

    async def export(self, request: pb.ExportRequest, seconds: float) -> None:
        """Sends a batch within `seconds`. Raises ExportFailed."""

    async def close(self) -> None:
        """Closes the connection."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a collector."""

    address: str  # host:port
    encrypted: bool
    path: str = ""  # of OTLP over HTTP; empty: OTLP over gRPC

    @classmethod
    def of(cls, url: str) -> Self:
        """Parses http://, https:// or no scheme, then HOST:PORT and, for HTTP, a path. Raises InvalidRequest."""
        scheme, separator, rest = url.partition("://")
        address, slash, path = (rest if separator else url).partition("/")
        host, _, port = address.rpartition(":")
        if (separator and scheme not in ("http", "https")) or not host or not port.isdecimal() or "@" in address:
            raise InvalidRequest(
                f"otlp_endpoint is {url!r}; give http://HOST:PORT of a collector's OTLP over gRPC, usually port 4317, "
                "or http://HOST:PORT/v1/traces of its OTLP over HTTP, usually port 4318",
                field="otlp_endpoint",
            )
        return cls(address, scheme == "https" and bool(separator), slash + path if path else "")

    def exporter(self) -> Exporter:
        """Returns an exporter to this collector. Call on the event loop's thread."""
        return HttpExporter(self) if self.path else GrpcExporter(self)


class GrpcExporter:
    """Implements Exporter over gRPC."""

    def __init__(self, endpoint: Endpoint) -> None:
        options = (("grpc.enable_http_proxy", 0),)
        self._channel = (
            grpc.aio.secure_channel(endpoint.address, grpc.ssl_channel_credentials(), options)
            if endpoint.encrypted
            else grpc.aio.insecure_channel(endpoint.address, options)
        )
        self._export: grpc.aio.UnaryUnaryMultiCallable[pb.ExportRequest, bytes] = self._channel.unary_unary(
            _EXPORT, request_serializer=pb.ExportRequest.SerializeToString
        )

    async def export(self, request: pb.ExportRequest, seconds: float) -> None:
        try:
            await self._export(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            raise ExportFailed(problem_of(error)) from error

    async def close(self) -> None:
        await self._channel.close(None)


class HttpExporter:
    """Implements Exporter over HTTP/1.1, on threads: a batch is sent every two seconds at most."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._connection: http.client.HTTPConnection | None = None

    async def export(self, request: pb.ExportRequest, seconds: float) -> None:
        await asyncio.to_thread(self._post, request.SerializeToString(), seconds)

    async def close(self) -> None:
        self._drop()

    def _post(self, body: bytes, seconds: float) -> None:
        kept = self._connection is not None
        try:
            self._send(body, seconds)
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            if not kept:
                raise ExportFailed(f"{type(error).__name__}: {error}") from error
            # The collector may have closed the idle connection.
            self._post(body, seconds)

    def _send(self, body: bytes, seconds: float) -> None:
        connection = self._connection = self._connection or self._open()
        connection.timeout = seconds
        if connection.sock is not None:
            connection.sock.settimeout(seconds)
        connection.request("POST", self._endpoint.path, body, {"content-type": "application/x-protobuf"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise ExportFailed(f"status {answer.status}: {text[:_SHOWN].decode(errors='replace')}")

    def _open(self) -> http.client.HTTPConnection:
        parts = urllib.parse.urlsplit(f"//{self._endpoint.address}")
        if self._endpoint.encrypted:
            return http.client.HTTPSConnection(parts.hostname or "", parts.port, context=ssl.create_default_context())
        return http.client.HTTPConnection(parts.hostname or "", parts.port)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
