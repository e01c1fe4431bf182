"""The routes for vectors: POST /v1/embeddings, /classify and /pooling; and the list of all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from baton.gateway.http.exchange import Exchange
from baton.gateway.models.served import ServedModel
from baton.gateway.models.tasks import TASK_NAMES, TASKS, check_dimensions
from baton.gateway.pooling.embed_by_type import EmbedByType
from baton.gateway.pooling.generative_scoring import GenerativeScoring
from baton.gateway.pooling.jina import adopt_jina, with_task
from baton.gateway.pooling.scores import Rerank, Scores
from baton.gateway.pooling.texts import texts_of
from baton.gateway.pooling.vectors import Vectors, VectorService, Wanted, require_task
from baton.gateway.pooling.written import written
from baton.gateway.rest.routing import Handler, Route
from baton.gateway.schemas.embed_by_type import EmbedByTypeRequest, EmbedByTypeResponse
from baton.gateway.schemas.generative_scoring import GenerativeScoringRequest, GenerativeScoringResponse
from baton.gateway.schemas.pooling import (
    ClassifyRequest,
    ClassifyResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from baton.gateway.serving.context import ServingContext
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

_SCORES = ("/score", "/v1/score")
_RERANKS = "Orders documents by their relevance for a query."
_ERRORS = (400, 404, 408, 413, 429, 500, 503, 504)


class Embeddings:
    """Handles POST /v1/embeddings."""

    def __init__(self, service: VectorService) -> None:
        self._service = service
        self._decoder = service.decoder(EmbeddingRequest)

    async def __call__(self, exchange: Exchange) -> None:
        service = self._service
        with service.serving.counting_rejections():
            request, model, texts = await service.read(exchange, self._decoder, texts_of)
            adopt_jina(request)
            texts = with_task(model, texts, request.task)
            found = await service.answer(exchange, Wanted(request, model, texts, embed_params(model, request)))
        if found is None:
            return
        encoding = request.embedding_type or request.encoding_format
        data = [
            {"object": "embedding", "index": index, "embedding": written(vectors[0], encoding)}
            for index, vectors in enumerate(found.arrays)
        ]
        _respond(exchange, {"object": "list", "data": data, "model": model.name}, found)


def embed_params(model: ServedModel, request: EmbeddingRequest) -> types_pb2.PoolingParams:
    """Returns what workers compute for embeddings. Raises InvalidRequest."""
    pooler = require_task(model, types_pb2.POOLING_TASK_EMBED)
    dimensions = check_dimensions(request.dimensions, pooler)
    return types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_EMBED, dimensions=dimensions)


class Classify:
    """Handles POST /classify."""

    def __init__(self, service: VectorService) -> None:
        self._service = service
        self._decoder = service.decoder(ClassifyRequest)

    async def __call__(self, exchange: Exchange) -> None:
        service = self._service
        with service.serving.counting_rejections():
            request, model, texts = await service.read(exchange, self._decoder, texts_of)
            labels = require_task(model, types_pb2.POOLING_TASK_CLASSIFY).labels
            params = types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_CLASSIFY)
            found = await service.answer(exchange, Wanted(request, model, texts, params))
        if found is None:
            return
        data = [_classified(index, vectors[0], labels) for index, vectors in enumerate(found.arrays)]
        _respond(exchange, _head(exchange, "classify", model.name, data), found)


class Pooling:
    """Handles POST /pooling."""

    def __init__(self, service: VectorService) -> None:
        self._service = service
        self._decoder = service.decoder(PoolingRequest)

    async def __call__(self, exchange: Exchange) -> None:
        service = self._service
        with service.serving.counting_rejections():
            request, model, texts = await service.read(exchange, self._decoder, texts_of)
            tasks = model.require_info().pooler.tasks
            name = request.task or (TASK_NAMES[tasks[0]] if tasks else "embed")
            pooler = require_task(model, TASKS[name])
            if request.dimensions is not None and pooler.labels:
                raise InvalidRequest("dimensions is not for scores of classes; leave it out", field="dimensions")
            params = types_pb2.PoolingParams(task=TASKS[name], dimensions=check_dimensions(request.dimensions, pooler))
            found = await service.answer(exchange, Wanted(request, model, texts, params))
        if found is None:
            return
        by_token = name.startswith("token")
        data = [
            {
                "object": "pooling",
                "index": index,
                "data": written(vectors if by_token else vectors[0], request.encoding_format),
            }
            for index, vectors in enumerate(found.arrays)
        ]
        _respond(exchange, _head(exchange, "pool", model.name, data), found)


def _head(exchange: Exchange, prefix: str, model: str, data: list[Any]) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{exchange.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
    }


def _classified(index: int, scores: NDArray[np.float32], labels: Sequence[str]) -> dict[str, Any]:
    return {"index": index, "label": labels[int(scores.argmax())], "probs": scores, "num_classes": len(labels)}


def _respond(exchange: Exchange, body: dict[str, Any], found: Vectors) -> None:
    usage = {"prompt_tokens": found.usage.prompt_tokens, "total_tokens": found.usage.total_tokens}
    exchange.respond(200, orjson.dumps({**body, "usage": usage}, option=orjson.OPT_SERIALIZE_NUMPY))


def pooling_routes(serving: ServingContext) -> list[Route]:
    """Returns the routes for vectors."""
    if serving.pooler is None:
        return []
    service = VectorService(serving, serving.pooler)
    scores, rerank = Scores(service), Rerank(service)
    return [
        _route("/v1/embeddings", Embeddings(service), "Embeds texts.", EmbeddingRequest, EmbeddingResponse),
        _route("/v2/embed", EmbedByType(service), "Embeds texts.", EmbedByTypeRequest, EmbedByTypeResponse),
        _route("/classify", Classify(service), "Classifies texts.", ClassifyRequest, ClassifyResponse),
        _route("/pooling", Pooling(service), "Returns a model's vectors of texts.", PoolingRequest, PoolingResponse),
        *(_route(path, scores, "Scores pairs of texts.", ScoreRequest, ScoreResponse) for path in _SCORES),
        *(_route(path, rerank, _RERANKS, RerankRequest, RerankResponse) for path in ("/rerank", "/v1/rerank")),
        _route("/v2/rerank", Rerank(service, cohere=True), _RERANKS, RerankRequest, RerankResponse),
        _route(
            "/generative_scoring",
            GenerativeScoring(service),
            "Scores items by the probability of their next token.",
            GenerativeScoringRequest,
            GenerativeScoringResponse,
        ),
    ]


def _route(
    path: str, handler: Handler, text: str, request: type[msgspec.Struct], response: type[msgspec.Struct]
) -> Route:
    return Route("POST", path, handler, text, request, response, errors=_ERRORS)
