"""Generations over gRPC take the places that REST's take: no more run at this gateway than it was set to."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from baton.gateway.config import GatewayConfig
from baton.gateway.serving.admission import Admission
from baton.rpc.server import Context

_SPARE_STREAMS = 1024
_GENERATE = "/baton.v1.InferenceService/Generate"


class Places(grpc.aio.ServerInterceptor):
    """Admits each call of Generate, for as long as it lasts; what it raises becomes a status around it."""

    def __init__(self, admission: Admission) -> None:
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
            ticket = self._admission.admit(uuid.uuid4().hex, max(1, getattr(request, "n", 1)))
            context.add_done_callback(lambda _: ticket.end())  # type: ignore[arg-type]
            return handler.unary_stream(request, context)

        return grpc.unary_stream_rpc_method_handler(
            generate,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def edge_options(config: GatewayConfig) -> dict[str, int]:
    """What strangers may send to the public gRPC port, as gRPC's options: the limits of REST's."""
    return {
        "grpc.max_receive_message_length": config.max_body_bytes,
        "grpc.max_metadata_size": config.max_header_bytes,
        "grpc.absolute_max_metadata_size": config.max_header_bytes,
        "grpc.server_handshake_timeout_ms": int(config.header_timeout * 1000),
        # Of one connection. Beyond, clients wait in silence; so places run out first, and are refused aloud.
        "grpc.max_concurrent_streams": config.max_streams + _SPARE_STREAMS,
    }
