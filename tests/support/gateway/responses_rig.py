"""Responses over both public APIs: one scripted generator, one store, a raw HTTP client and a real gRPC client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.gateway.rest_harness import Rest, Script, rest_side

from baton.gateway.access.gate import OpenGate
from baton.gateway.access.identity import Identity, Tenant
from baton.gateway.config import GatewayConfig
from baton.gateway.grpc.responses.calls import ResponseCalls
from baton.gateway.grpc.servicer import InferenceServicer
from baton.gateway.responses.service import ResponseService
from baton.gateway.serving.context import ServingContext
from baton.rpc.server.server import RpcServer, Service
from baton.v1 import inference_pb2 as pb
from baton.v1 import response_pb2
from baton.v1.inference_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server

HI = response_pb2.ResponseItem(message=response_pb2.ItemMessage(role="user", text="Hi"))


class GateOf(OpenGate):
    """A gate with one tenant for all clients."""

    def __init__(self, tenant: str) -> None:
        self._identity = Identity(Tenant(tenant))

    def identify(self, keys: Any, scope: Any) -> Identity:
        return self._identity


def item(**fields: Any) -> response_pb2.ResponseItem:
    return response_pb2.ResponseItem(**fields)


# A complete response has its whole text, which may have filled a slow client's buffers.
_ANY_SIZE = (("grpc.max_receive_message_length", -1),)


@contextlib.asynccontextmanager
async def both_sides(
    script: Script | None = None, tenant: str = "", **settings: Any
) -> AsyncIterator[tuple[Rest, InferenceServiceStub]]:
    """Yields the REST server, and a stub of the gRPC server with the same generator and store."""
    async with rest_side(script, **settings) as rest:
        gate = GateOf(tenant)
        config = GatewayConfig(model="storyteller-7m")
        serving = ServingContext(config, rest.catalog, rest.generator, rest.admission, rest.metrics, gate)
        calls = ResponseCalls(ResponseService(serving, rest.responses))
        servicer = InferenceServicer(rest.generator, rest.catalog, gate=gate, responses=calls)
        service = Service("baton.v1.InferenceService", servicer, add_InferenceServiceServicer_to_server)
        async with (
            RpcServer("127.0.0.1:0", [service], grace_seconds=0) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=_ANY_SIZE) as channel,
        ):
            yield rest, InferenceServiceStub(channel)


def asked(*items: response_pb2.ResponseItem, **fields: Any) -> pb.CreateResponseRequest:
    return pb.CreateResponseRequest(input=items or (HI,), **fields)


async def create(
    stub: InferenceServiceStub, *items: response_pb2.ResponseItem, **fields: Any
) -> list[response_pb2.ResponseEvent]:
    return [answer.event async for answer in stub.CreateResponse(asked(*items, **fields), timeout=20)]


async def get(stub: InferenceServiceStub, response_id: str) -> response_pb2.ModelResponse:
    return (await stub.GetResponse(response_pb2.GetResponseRequest(response_id=response_id), timeout=20)).response


async def watch(stub: InferenceServiceStub, response_id: str, **fields: Any) -> list[response_pb2.ResponseEvent]:
    request = response_pb2.WatchResponseRequest(response_id=response_id, **fields)
    return [answer.event async for answer in stub.WatchResponse(request, timeout=20)]


@contextlib.contextmanager
def refused(code: grpc.StatusCode, field: str | None = None) -> Iterator[None]:
    """Expects a call to fail with this code, and this field in its details."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code() is code, caught.value
    if field is None:
        return
    wrong = error_details_pb2.BadRequest()
    assert any(detail.Unpack(wrong) for detail in rpc_status.from_call(caught.value).details), caught.value
    assert [violation.field for violation in wrong.field_violations] == [field]
