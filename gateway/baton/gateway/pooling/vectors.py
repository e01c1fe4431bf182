"""The steps that all routes and calls for vectors share: limits, texts, and the vectors of workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from baton.gateway.access.gate import Permit
from baton.gateway.access.limits.usage import RequestCost, TokensUsed
from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.core import PooledText, PoolRequest, TextPooler
from baton.gateway.http.exchange import Exchange
from baton.gateway.models.served import ServedModel
from baton.gateway.models.tasks import Task, check_task
from baton.gateway.pooling.averages import averaged
from baton.gateway.pooling.encoding import Encoded, encode_texts
from baton.gateway.pooling.pairs import NamedPair, encode_pairs
from baton.gateway.pooling.texts import Named
from baton.gateway.pooling.work import result_for
from baton.gateway.schemas.pooling import PoolingUsage, VectorFields
from baton.gateway.serving.context import Call, ServingContext
from baton.gateway.serving.tenancy import tenants_priority
from baton.rpc.errors import DataLoss, InvalidRequest, ServiceError
from baton.v1 import types_pb2

B = TypeVar("B", bound=Struct)
R = TypeVar("R", bound=VectorFields)
T = TypeVar("T")


def require_task(model: ServedModel, task: Task) -> types_pb2.PoolerInfo:
    """Returns the model's pooler. Raises InvalidRequest, which names the right route, for a model without the task."""
    return check_task(model.name, model.require_info(), task)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request for vectors computes."""

    fields: VectorFields
    model: ServedModel
    texts: Sequence[Named] | Sequence[NamedPair]
    params: types_pb2.PoolingParams
    timeout_ms: int = 0  # 0: the gateway's limit


@dataclass(frozen=True, slots=True)
class Vectors:
    """The result of a request for vectors."""

    arrays: Sequence[NDArray[np.float32]]  # of each text, [num_vectors, width]
    usage: PoolingUsage
    num_cached_tokens: int


class VectorService:
    """Answers requests for vectors."""

    def __init__(self, serving: ServingContext, pooler: TextPooler) -> None:
        self.serving = serving
        self._pooler = pooler

    def decoder(self, kind: type[B]) -> BodyDecoder[B]:
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

    async def answer(self, exchange: Exchange, wanted: Wanted) -> Vectors | None:
        """Returns the vectors for an HTTP exchange. None: the client left. Raises ServiceError."""
        if wanted.fields.request_id:
            exchange.request_id = wanted.fields.request_id
        return await result_for(exchange, self.compute(exchange, wanted))

    async def compute(self, call: Call, wanted: Wanted) -> Vectors:
        """Returns the vectors. Admits the call until its end. Raises ServiceError; Cancelled if it was aborted."""
        serving, tenant = self.serving, call.identity.tenant.name
        try:
            return await serving.running.run(self._compute(call, wanted), tenant, call.request_id)
        except asyncio.CancelledError:
            serving.meter(call, 1).on_abort()
            raise

    async def _compute(self, call: Call, wanted: Wanted) -> Vectors:
        serving, identity, params = self.serving, call.identity, wanted.params
        _check_chunks(wanted)
        admitted = serving.admission.admit(call.request_id, 1)
        call.on_end.append(lambda _: admitted.end())
        encoded = await _encoded(wanted)
        num_tokens = sum(text.num_tokens for text in encoded)
        permit = await serving.gate.admit(identity, RequestCost(input_tokens=num_tokens))
        call.limit_headers = permit.headers()
        call.on_end.append(lambda _: _settle(permit, num_tokens))
        raw = wanted.fields.use_activation is False
        in_pieces = any(len(text.pieces) > 1 for text in encoded)
        # The mean of pieces is that of their unnormalized vectors.
        params.raw = raw or in_pieces
        meter = serving.meter(call, 1)
        pooled = await self._pool(self._request(call, admitted.request_id, wanted, encoded), encoded)
        num_cached = sum(text.cached_tokens for text in pooled)
        meter.on_done(num_tokens, 0, num_cached)
        arrays = [np.frombuffer(one.values, "<f4").reshape(one.num_vectors, -1) for one in pooled]
        if in_pieces:
            normalize = not raw and wanted.model.require_info().pooler.normalized
            arrays = averaged(arrays, [[len(piece) for piece in text.pieces] for text in encoded], normalize)
        return Vectors(arrays, PoolingUsage(num_tokens, num_tokens), num_cached)

    async def _pool(self, request: PoolRequest, encoded: Sequence[Encoded]) -> list[PooledText]:
        try:
            return await self._pooler.pool(request)
        except ServiceError as error:
            _, named, number = error.field.partition("input.")
            if named and number.isdecimal():
                fields = [text.field for text in encoded for _ in text.pieces]
                error.field = fields[int(number)]
                if isinstance(error, DataLoss):
                    error.message = f"{error.field}: {error.message}"
            raise

    def _request(self, call: Call, request_id: str, wanted: Wanted, encoded: Sequence[Encoded]) -> PoolRequest:
        fields, tenant = wanted.fields, call.identity.tenant
        limit = int(self.serving.config.request_timeout * 1000)
        return PoolRequest(
            request_id=request_id,
            model=wanted.model.name,
            texts=[piece for text in encoded for piece in text.pieces],
            second_starts=[text.second_start for text in encoded] if encoded[0].second_start else (),
            params=wanted.params,
            priority=tenants_priority(tenant, fields.priority or 0),
            cache_salt=fields.cache_salt or "",
            timeout_ms=min(limit, wanted.timeout_ms) if limit and wanted.timeout_ms else limit or wanted.timeout_ms,
            tenant=tenant.name,
            tenant_salt=tenant.salt,
            tenant_weight=tenant.weight,
            traceparent=call.headers.get(b"traceparent", b"").decode("latin-1"),
        )

    def _check(
        self, exchange: Exchange, decoder: BodyDecoder[R], texts_of: Callable[[R], T]
    ) -> tuple[R, ServedModel, T]:
        request = decoder.read(exchange)
        return request, self.serving.model(exchange, request.model), texts_of(request)


async def _encoded(wanted: Wanted) -> list[Encoded]:
    """Returns the prompts of texts, or of pairs."""
    model, fields, texts = wanted.model, wanted.fields, wanted.texts
    pairs = [text for text in texts if isinstance(text, NamedPair)]
    if not pairs:
        return await encode_texts(model, fields, [text for text in texts if isinstance(text, Named)])
    joined = await encode_pairs(model, fields, pairs)
    return [
        Encoded([pair.token_ids], named.field, pair.second_start) for pair, named in zip(joined, pairs, strict=True)
    ]


def _check_chunks(wanted: Wanted) -> None:
    """Raises InvalidRequest for means of what is no embedding of a text."""
    if wanted.fields.enable_chunked_processing and wanted.params.task != types_pb2.POOLING_TASK_EMBED:
        message = "enable_chunked_processing is for embeddings of whole texts; leave it out"
        raise InvalidRequest(message, field="enable_chunked_processing")


def _settle(permit: Permit, num_tokens: int) -> None:
    permit.settle(TokensUsed(num_tokens, 0))
