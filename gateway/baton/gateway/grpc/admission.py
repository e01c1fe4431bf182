"""Admits gRPC generations under the same limit of running generations as REST."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from baton.gateway.config import GatewayConfig
from baton.gateway.serving.admission import ConcurrencyLimiter
from baton.rpc.server.server import Context

_SPARE_STREAMS = 1024
_GENERATE = "/baton.v1.InferenceService/Generate"


class AdmissionInterceptor(grpc.aio.ServerInterceptor):
    """Admits each call of Generate for as long as it lasts. The outer interceptor turns its errors into a status."""

    def __init__(self, admission: ConcurrencyLimiter) -> None:
        self._admission = admission

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        found = await continuation(handler_call_details)
        if found is None or handler_call_details.method != _GENERATE:
            return found
        handler: Any = found

        def generate(request: Any, context: Context) -> Any:
            admitted = self._admission.admit(uuid.uuid4().hex, max(1, getattr(request, "n", 1)))
            context.add_done_callback(lambda _: admitted.end())  # type: ignore[arg-type]
            return handler.unary_stream(request, context)

        return grpc.unary_stream_rpc_method_handler(
            generate,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def edge_options(config: GatewayConfig) -> dict[str, int]:
    """Returns gRPC options with REST's limits for what untrusted clients may send to the public port."""
    return {
        "grpc.max_receive_message_length": config.max_body_bytes,
        "grpc.max_metadata_size": config.max_header_bytes,
        "grpc.absolute_max_metadata_size": config.max_header_bytes,
        "grpc.server_handshake_timeout_ms": int(config.header_timeout * 1000),
        # Per connection. Calls beyond it wait without an error, so the admission limit must be reached first.
        "grpc.so_reuseport": int(bool(config.metrics_folder)),
        "grpc.max_concurrent_streams": config.max_streams + _SPARE_STREAMS,
    }
