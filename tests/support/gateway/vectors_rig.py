"""The gateway's REST server with scripted vectors, and its gRPC server over the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from support.gateway.rest_harness import Rest, rest_side

from baton.gateway.access.gate import Gate, OpenGate, Permit
from baton.gateway.access.identity import Identity, Tenant
from baton.gateway.access.limits.usage import RequestCost, TokensUsed
from baton.gateway.config import GatewayConfig
from baton.gateway.core import PooledText, PoolRequest
from baton.gateway.grpc.servicer import InferenceServicer
from baton.gateway.grpc.vectors.calls import VectorCalls
from baton.gateway.models.text_prompts import TextPrompts
from baton.gateway.pooling.vectors import VectorService
from baton.gateway.serving.context import ServingContext
from baton.rpc.errors import NoCapacity
from baton.rpc.server.server import RpcServer, Service
from baton.v1 import types_pb2
from baton.v1.inference_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server

WIDTH = 16
EMBEDS = types_pb2.PoolerInfo(
    tasks=(types_pb2.POOLING_TASK_EMBED, types_pb2.POOLING_TASK_TOKEN_EMBED), width=WIDTH, normalized=True
)
CLASSIFIES = types_pb2.PoolerInfo(
    tasks=(types_pb2.POOLING_TASK_CLASSIFY, types_pb2.POOLING_TASK_TOKEN_CLASSIFY), width=3, labels=("a", "b", "c")
)
EMBEDS_TOKENS = types_pb2.PoolerInfo(tasks=(types_pb2.POOLING_TASK_TOKEN_EMBED,), width=WIDTH, normalized=True)
SCORES_PAIRS = types_pb2.PoolerInfo(tasks=(types_pb2.POOLING_TASK_CLASSIFY,), width=1, takes_pairs=True)
BY_TOKEN = (types_pb2.POOLING_TASK_TOKEN_EMBED, types_pb2.POOLING_TASK_TOKEN_CLASSIFY)


class FakePooler:
    """Implements TextPooler: vectors follow from the token ids. Records requests."""

    def __init__(self, width: int = WIDTH) -> None:
        self.width = width
        self.requests: list[PoolRequest] = []
        self.hold: asyncio.Event | None = None  # pool() waits for it
        self.num_cancelled = 0

    async def pool(self, request: PoolRequest) -> list[PooledText]:
        self.requests.append(request)
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return [self._pooled(ids, request.params) for ids in request.texts]

    def _pooled(self, ids: Sequence[int], params: types_pb2.PoolingParams) -> PooledText:
        texts = [[token_id] for token_id in ids] if params.task in BY_TOKEN else [ids]
        values = np.stack([vector_of(text, self.width) for text in texts])
        return PooledText(values.astype("<f4").tobytes(), len(texts), 1)


def vector_of(token_ids: Sequence[int], width: int = WIDTH) -> np.ndarray:
    seed = np.array(token_ids, np.uint32)
    return np.random.default_rng(seed).standard_normal(width).astype(np.float32)


class CountingGate(OpenGate):
    """A gate for one tenant that records what requests reserve and use."""

    def __init__(self) -> None:
        self.costs: list[RequestCost] = []
        self.used: list[TokensUsed] = []
        self.refusal: NoCapacity | None = None

    def identify(self, keys: Any, scope: Any = None) -> Identity:
        return Identity(Tenant("acme", salt="grains"))

    async def admit(self, identity: Identity, cost: RequestCost) -> Permit:
        if self.refusal is not None:
            raise self.refusal
        self.costs.append(cost)
        return _CountedPermit(self)


class _CountedPermit:
    """Permits everything, and keeps what was used."""

    def __init__(self, gate: CountingGate) -> None:
        self._gate = gate

    def settle(self, used: TokensUsed) -> None:
        self._gate.used.append(used)

    def headers(self, anthropic: bool = False) -> dict[str, str]:
        return {"x-ratelimit-remaining-requests": "9"}


@contextlib.asynccontextmanager
async def vectors_side(
    pooler: FakePooler,
    prompts: Mapping[str, str] | None = None,
    default: str = "",
    max_model_len: int = 64,
    pools: types_pb2.PoolerInfo | None = EMBEDS,
    **settings: Any,
) -> AsyncIterator[Rest]:
    """A model that returns vectors, with these prompts."""
    async with rest_side(pooler=pooler, **settings) as rest:
        model = rest.catalog.get("")
        model.text_prompts = TextPrompts(prompts or {}, default)
        info = model.require_info()
        info.max_model_len = max_model_len
        if pools is not None:
            info.pooler.CopyFrom(pools)
        yield rest


@contextlib.asynccontextmanager
async def both_servers(
    pooler: FakePooler, gate: Gate | None = None, **settings: Any
) -> AsyncIterator[tuple[Rest, str]]:
    """Yields the REST server, and the address of the gRPC server with the same model."""
    async with vectors_side(pooler, **settings) as rest:
        gate = gate or OpenGate()
        config = GatewayConfig(model="storyteller-7m")
        serving = ServingContext(
            config, rest.catalog, rest.generator, rest.admission, rest.metrics, gate, pooler=pooler
        )
        calls = VectorCalls(VectorService(serving, pooler), None)
        servicer = InferenceServicer(rest.generator, rest.catalog, gate=gate, vectors=calls, running=serving.running)
        service = Service("baton.v1.InferenceService", servicer, add_InferenceServiceServicer_to_server)
        async with RpcServer("127.0.0.1:0", [service], grace_seconds=0) as server:
            yield rest, f"127.0.0.1:{server.port}"


@contextlib.asynccontextmanager
async def both_sides(
    pooler: FakePooler, gate: Gate | None = None, **settings: Any
) -> AsyncIterator[tuple[Rest, InferenceServiceStub]]:
    """Yields the REST server, and a stub of the gRPC server with the same model."""
    async with (
        both_servers(pooler, gate, **settings) as (rest, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield rest, InferenceServiceStub(channel)
