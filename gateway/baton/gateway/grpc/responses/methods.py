"""The methods of the public gRPC API for responses, which REST keeps in the same store."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator

from baton.gateway.access.gate import Gate
from baton.gateway.access.refusals import Refusals
from baton.gateway.access.rpc_guard import identity_of
from baton.gateway.grpc.access_line import AccessLine
from baton.gateway.grpc.responses.calls import ResponseCalls
from baton.gateway.grpc.rpc_call import RpcCall
from baton.gateway.tracing.calls import trace_call
from baton.gateway.tracing.request import GatewayTracing
from baton.rpc.errors import ServiceError
from baton.rpc.server.server import Context
from baton.v1 import inference_pb2, response_pb2

_CREATE_RESPONSE = "/baton.v1.InferenceService/CreateResponse"


class ResponseMethods:
    """The methods of InferenceService for responses."""

    _gate: Gate
    _refusals: Refusals
    _tracing: GatewayTracing | None

    @property
    @abstractmethod
    def _kept(self) -> ResponseCalls:
        """Returns the calls. Raises Unsupported without them."""

    async def CreateResponse(  # noqa: N802
        self, request: inference_pb2.CreateResponseRequest, context: Context
    ) -> AsyncIterator[response_pb2.CreateResponseResponse]:
        line = AccessLine("CreateResponse", context)
        request_id = request.request_id or f"resp-{uuid.uuid4().hex}"
        call = RpcCall(identity_of(self._gate, context), request_id, path=_CREATE_RESPONSE)
        traceparent = trace_call(self._tracing, context, "CreateResponse", lambda: call.outcome)
        call.headers = {b"traceparent": traceparent.encode(errors="replace")}
        if request.session_id:
            call.headers = {**call.headers, b"x-session-id": request.session_id.encode()}
        try:
            async with self._refusals.counting(call.identity, request.ByteSize(), lambda: bool(call.limit_headers)):
                async for event in self._kept.create(call, request, context):
                    yield response_pb2.CreateResponseResponse(event=event)
        except ServiceError as error:
            call.outcome = error.code.name
            raise
        finally:
            line.write(call.request_id, call.outcome, call.identity)

    async def GetResponse(  # noqa: N802
        self, request: response_pb2.GetResponseRequest, context: Context
    ) -> response_pb2.GetResponseResponse:
        response = await self._kept.get(identity_of(self._gate, context), request.response_id)
        return response_pb2.GetResponseResponse(response=response)

    async def WatchResponse(  # noqa: N802
        self, request: response_pb2.WatchResponseRequest, context: Context
    ) -> AsyncIterator[response_pb2.WatchResponseResponse]:
        first = request.starting_after + 1 if request.HasField("starting_after") else 0
        async for event in self._kept.watch(identity_of(self._gate, context), request.response_id, first, context):
            yield response_pb2.WatchResponseResponse(event=event)

    async def CancelResponse(  # noqa: N802
        self, request: response_pb2.CancelResponseRequest, context: Context
    ) -> response_pb2.CancelResponseResponse:
        response = await self._kept.cancel(identity_of(self._gate, context), request.response_id)
        return response_pb2.CancelResponseResponse(response=response)

    async def DeleteResponse(  # noqa: N802
        self, request: response_pb2.DeleteResponseRequest, context: Context
    ) -> response_pb2.DeleteResponseResponse:
        await self._kept.delete(identity_of(self._gate, context), request.response_id)
        return response_pb2.DeleteResponseResponse()

    async def ListResponseInput(  # noqa: N802
        self, request: response_pb2.ListResponseInputRequest, context: Context
    ) -> response_pb2.ListResponseInputResponse:
        return await self._kept.list_input(identity_of(self._gate, context), request)
