"""The calls of the public gRPC API for vectors: admitted, limited, counted, traced and logged like REST's."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.gateway.access.refusals import Refusals
from baton.gateway.access.rpc_guard import identity_of
from baton.gateway.grpc.access_line import AccessLine
from baton.gateway.grpc.field_names import name_methods
from baton.gateway.grpc.rpc_call import RpcCall
from baton.gateway.grpc.vectors.fields import TextsRequest
from baton.gateway.models.served import ServedModel
from baton.gateway.pooling.vectors import Vectors, VectorService, Wanted
from baton.gateway.tracing.calls import trace_call
from baton.gateway.tracing.request import GatewayTracing
from baton.rpc.errors import ServiceError
from baton.rpc.server.server import Context
from baton.v1 import vectors_pb2

Request = TextsRequest | vectors_pb2.ScoreRequest | vectors_pb2.RerankRequest

_SERVICE = "/baton.v1.InferenceService"


class VectorCalls:
    """Runs the calls for vectors."""

    def __init__(self, service: VectorService, tracing: GatewayTracing | None) -> None:
        self._service = service
        self._tracing = tracing
        self._refusals = Refusals(service.serving.gate)

    @asynccontextmanager
    async def answering(self, method: str, request: Request, context: Context) -> AsyncIterator[RpcCall]:
        """Wraps a call until its last response. Errors name methods, not routes."""
        line = AccessLine(method, context)
        serving = self._service.serving
        request_id = request.options.request_id or f"{method.lower()}-{uuid.uuid4().hex}"
        call = RpcCall(identity_of(serving.gate, context), request_id, path=f"{_SERVICE}/{method}")
        traceparent = trace_call(self._tracing, context, method, lambda: call.outcome)
        call.headers = {b"traceparent": traceparent.encode(errors="replace")}
        # A call that is cancelled during a write leaves its iterator to the garbage collector.
        context.add_done_callback(lambda _: call.end())  # type: ignore[arg-type]
        num_bytes = request.ByteSize()
        try:
            with serving.counting_rejections():
                async with self._refusals.counting(call.identity, num_bytes, lambda: bool(call.limit_headers)):
                    if serving.names is not None:
                        await serving.names.ensure(call.identity, request.model)
                    yield call
            call.outcome = "OK"
        except ServiceError as error:
            name_methods(error)
            call.outcome = error.code.name
            raise
        finally:
            call.end()
            line.write(call.request_id, call.outcome, call.identity)

    def model(self, call: RpcCall, request: Request) -> ServedModel:
        """Returns the requested model. Raises NotFound."""
        return self._service.serving.model(call, request.model)

    async def compute(self, call: RpcCall, context: Context, wanted: Wanted) -> Vectors:
        """Returns the vectors, after the tenant's remaining limits were sent. Raises ServiceError."""
        found = await self._service.compute(call, wanted)
        if call.limit_headers:
            await context.send_initial_metadata(tuple(call.limit_headers.items()))
        return found
