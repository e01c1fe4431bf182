"""The steps that all routes for vectors share: the model and its task, limits, texts, and the vectors of workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.gateway.access.gate import Permit
from baton.gateway.access.limits.usage import RequestCost, TokensUsed
from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.core import PooledText, PoolRequest, TextPooler
from baton.gateway.http.exchange import Exchange
from baton.gateway.models.served import ServedModel
from baton.gateway.pooling.pairs import NamedPair, encode_pairs
from baton.gateway.pooling.texts import Named, encode_texts
from baton.gateway.schemas.pooling import PoolingUsage, VectorFields
from baton.gateway.serving.context import ServingContext
from baton.gateway.serving.tenancy import tenants_priority
from baton.rpc.errors import InvalidRequest, ServiceError
from baton.v1 import types_pb2

R = TypeVar("R", bound=VectorFields)
T = TypeVar("T")

TASK_NAMES = {
    types_pb2.POOLING_TASK_EMBED: "embed",
    types_pb2.POOLING_TASK_CLASSIFY: "classify",
    types_pb2.POOLING_TASK_TOKEN_EMBED: "token_embed",
    types_pb2.POOLING_TASK_TOKEN_CLASSIFY: "token_classify",
}
TASKS = {name: task for task, name in TASK_NAMES.items()}
_ROUTES = {
    types_pb2.POOLING_TASK_EMBED: "/v1/embeddings",
    types_pb2.POOLING_TASK_CLASSIFY: "/classify",
    types_pb2.POOLING_TASK_TOKEN_EMBED: "/pooling",
    types_pb2.POOLING_TASK_TOKEN_CLASSIFY: "/pooling",
}


def require_task(model: ServedModel, task: types_pb2.PoolingTask.ValueType) -> types_pb2.PoolerInfo:
    """Returns the model's pooler. Raises InvalidRequest, which names the right route, for a model without the task."""
    info = model.require_info()
    if task in info.pooler.tasks:
        return info.pooler
    routes = list(dict.fromkeys(_ROUTES[each] for each in info.pooler.tasks)) or ["/v1/chat/completions"]
    raise InvalidRequest(
        f"the model {model.name} has no task {TASK_NAMES[task]}; use {' or '.join(routes)} for it", field="model"
    )


def check_dimensions(dimensions: int | None, pooler: types_pb2.PoolerInfo) -> int:
    """Returns the number of values that embeddings are cut to; 0: all. Raises InvalidRequest."""
    if dimensions is None or dimensions == pooler.width:
        return 0
    if not pooler.cuttable:
        allowed = f"{pooler.width}: this model's embeddings cannot be cut"
    elif pooler.dimensions:
        allowed = f"one of {', '.join(map(str, pooler.dimensions))}"
    else:
        allowed = f"1 to {pooler.width}"
    fits = pooler.cuttable and (dimensions in pooler.dimensions if pooler.dimensions else dimensions < pooler.width)
    if not fits:
        raise InvalidRequest(f"dimensions is {dimensions}; it must be {allowed}", field="dimensions")
    return dimensions


@dataclass(frozen=True, slots=True)
class Vectors:
    """The result of a request for vectors."""

    pooled: Sequence[PooledText]
    usage: PoolingUsage

    def arrays(self) -> list[NDArray[np.float32]]:
        """Returns the vectors of each text, [num_vectors, width]."""
        return [np.frombuffer(text.values, "<f4").reshape(text.num_vectors, -1) for text in self.pooled]


class VectorService:
    """Answers requests for vectors."""

    def __init__(self, serving: ServingContext, pooler: TextPooler) -> None:
        self.serving = serving
        self._pooler = pooler

    def decoder(self, kind: type[R]) -> BodyDecoder[R]:
        """Returns the decoder of a route's requests."""
        serving = self.serving
        return BodyDecoder(kind, serving.config.strict_fields, serving.bodies.reader)

    async def read(
        self, exchange: Exchange, decoder: BodyDecoder[R], texts_of: Callable[[R], T]
    ) -> tuple[R, ServedModel, T]:
        """Returns a request, its model and its texts. Raises ServiceError."""
        return await self.serving.bodies.run(
            partial(self._check, exchange, decoder, texts_of), exchange.num_body_bytes, exchange.owner
        )

    async def compute(
        self,
        exchange: Exchange,
        request: R,
        model: ServedModel,
        texts: Sequence[Named] | Sequence[NamedPair],
        params: types_pb2.PoolingParams,
    ) -> Vectors | None:
        """Returns the vectors of texts. None: the client left. Raises ServiceError."""
        serving = self.serving
        if request.request_id:
            exchange.request_id = request.request_id
        admitted = serving.admission.admit(exchange.request_id, 1)
        exchange.on_end.append(lambda _: admitted.end())
        work = asyncio.ensure_future(self._compute(exchange, admitted.request_id, request, model, texts, params))
        exchange.begin_work(lambda: _cancel(work), _nothing)
        try:
            return await work
        except asyncio.CancelledError:
            work.cancel()
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return None

    async def _compute(
        self,
        exchange: Exchange,
        request_id: str,
        request: R,
        model: ServedModel,
        texts: Sequence[Named] | Sequence[NamedPair],
        params: types_pb2.PoolingParams,
    ) -> Vectors:
        serving, identity = self.serving, exchange.identity
        encoded, second_starts = await _encoded(model, request, texts)
        num_tokens = sum(map(len, encoded))
        permit = await serving.gate.admit(identity, RequestCost(input_tokens=num_tokens))
        exchange.limit_headers = permit.headers()
        exchange.on_end.append(lambda _: _settle(permit, num_tokens))
        params.raw = request.use_activation is False
        tenant = identity.tenant
        wanted = PoolRequest(
            request_id=request_id,
            model=model.name,
            texts=encoded,
            second_starts=second_starts,
            params=params,
            priority=tenants_priority(tenant, request.priority or 0),
            cache_salt=request.cache_salt or "",
            timeout_ms=int(serving.config.request_timeout * 1000),
            tenant=tenant.name,
            tenant_salt=tenant.salt,
            tenant_weight=tenant.weight,
            traceparent=exchange.headers.get(b"traceparent", b"").decode("latin-1"),
        )
        meter = serving.meter(exchange, 1)
        try:
            pooled = await self._pooler.pool(wanted)
        except ServiceError as error:
            _, named, number = error.field.partition("input.")
            if named and number.isdecimal():
                error.field = texts[int(number)].field
            raise
        meter.on_done(num_tokens, 0, sum(text.cached_tokens for text in pooled))
        return Vectors(pooled, PoolingUsage(num_tokens, num_tokens))

    def _check(
        self, exchange: Exchange, decoder: BodyDecoder[R], texts_of: Callable[[R], T]
    ) -> tuple[R, ServedModel, T]:
        request = decoder.read(exchange)
        return request, self.serving.model(exchange, request.model), texts_of(request)


async def _encoded(
    model: ServedModel, request: VectorFields, texts: Sequence[Named] | Sequence[NamedPair]
) -> tuple[list[list[int]], list[int]]:
    """Returns the prompts, and of pairs where their second texts begin."""
    pairs = [text for text in texts if isinstance(text, NamedPair)]
    if not pairs:
        return await encode_texts(model, request, [text for text in texts if isinstance(text, Named)]), []
    joined = await encode_pairs(model, request, pairs)
    return [pair.token_ids for pair in joined], [pair.second_start for pair in joined]


def _cancel(work: asyncio.Future[Any]) -> None:
    work.cancel()


def _settle(permit: Permit, num_tokens: int) -> None:
    permit.settle(TokensUsed(num_tokens, 0))


def _nothing() -> None:
    """Does nothing: the answer is one piece, so a slow client holds nothing up."""
