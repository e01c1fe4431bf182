"""The routes for scores of pairs: POST /score and /rerank, by a cross-encoder or the cosine of two embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from msgspec import to_builtins
from numpy.typing import NDArray

from baton.gateway.http.exchange import Exchange
from baton.gateway.models.served import ServedModel
from baton.gateway.models.text_prompts import DOCUMENT, QUERY
from baton.gateway.pooling.averages import normalized
from baton.gateway.pooling.pairs import NamedPair
from baton.gateway.pooling.texts import Named, check_count, filled
from baton.gateway.pooling.vectors import Vectors, VectorService, Wanted, require_task
from baton.gateway.schemas.pooling import BilledUnits, CohereMeta, RerankRequest, ScoreRequest, TextObject
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

_NAMES = (("queries", "documents"), ("data_1", "data_2"), ("text_1", "text_2"))
_COHERE_TOKENS = 4096  # of a document, unless the request says otherwise


class Scores:
    """Handles POST /score."""

    def __init__(self, service: VectorService) -> None:
        self._service = service
        self._decoder = service.decoder(ScoreRequest)

    async def __call__(self, exchange: Exchange) -> None:
        service = self._service
        with service.serving.counting_rejections():
            request, model, (queries, documents) = await service.read(exchange, self._decoder, _pairs_of)
            scored = await _scores(service, exchange, request, model, queries, documents)
        if scored is None:
            return
        scores, found = scored
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores.tolist())]
        body = {
            "id": f"score-{exchange.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "data": data,
            "usage": _usage(found),
        }
        exchange.respond(200, orjson.dumps(body))


class Rerank:
    """Handles POST /rerank. `cohere`: as Cohere's second version has it."""

    def __init__(self, service: VectorService, *, cohere: bool = False) -> None:
        self._service = service
        self._decoder = service.decoder(RerankRequest)
        self._cohere = cohere

    async def __call__(self, exchange: Exchange) -> None:
        service = self._service
        with service.serving.counting_rejections():
            request, model, texts = await service.read(exchange, self._decoder, self._texts_of)
            scored = await _scores(service, exchange, request, model, texts[:1], texts[1:])
        if scored is None:
            return
        scores, found = scored
        order = np.argsort(-scores, kind="stable")[: request.top_n or len(scores)].tolist()
        shows = request.return_documents if request.return_documents is not None else not self._cohere
        results = [
            {"index": index, "relevance_score": float(scores[index])}
            | ({"document": {"text": _text_of(request.documents[index])}} if shows else {})
            for index in order
        ]
        body: dict[str, Any] = {"id": f"rerank-{exchange.request_id}", "model": model.name, "results": results}
        if self._cohere:
            body["meta"] = to_builtins(CohereMeta(BilledUnits(search_units=1)))
        exchange.respond(200, orjson.dumps({**body, "usage": _usage(found)}))

    def _texts_of(self, request: RerankRequest) -> list[Named]:
        check_count(len(request.documents), "documents")
        most = request.max_tokens_per_doc or (_COHERE_TOKENS if self._cohere else 0)
        documents = [
            Named(filled(_text_of(document), f"documents.{index}"), f"documents.{index}", most, DOCUMENT)
            for index, document in enumerate(request.documents)
        ]
        return [Named(request.query, "query", uses=QUERY), *documents]


async def _scores(
    service: VectorService,
    exchange: Exchange,
    request: ScoreRequest | RerankRequest,
    model: ServedModel,
    queries: Sequence[Named],
    documents: Sequence[Named],
) -> tuple[NDArray[np.float64], Vectors] | None:
    """Returns the score of each document with its query: of one query, all documents. None: the client left."""
    pooler = model.require_info().pooler
    if pooler.takes_pairs:
        _check_one_class(model, pooler)
        firsts = [*queries] * (len(documents) if len(queries) == 1 else 1)
        pairs = [NamedPair(first, second) for first, second in zip(firsts, documents, strict=True)]
        params = types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_CLASSIFY)
        found = await service.answer(exchange, Wanted(request, model, pairs, params))
        return None if found is None else (np.concatenate(found.arrays)[:, 0].astype(np.float64), found)
    require_task(model, types_pb2.POOLING_TASK_EMBED)
    params = types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_EMBED)
    found = await service.answer(exchange, Wanted(request, model, [*queries, *documents], params))
    return None if found is None else (_cosines(found, len(queries)), found)


def _check_one_class(model: ServedModel, pooler: types_pb2.PoolerInfo) -> None:
    """Raises InvalidRequest for a classifier of several classes: none of them is the score."""
    if pooler.width != 1:
        raise InvalidRequest(
            f"the model {model.name} has {pooler.width} classes, and a score is that of one; use /classify for it",
            field="model",
        )


def _pairs_of(request: ScoreRequest) -> tuple[list[Named], list[Named]]:
    """Returns queries and documents; of one query, it alone. Raises InvalidRequest."""
    given = [
        (one, two) for one, two in _NAMES if getattr(request, one) is not None or getattr(request, two) is not None
    ]
    if len(given) != 1:
        raise InvalidRequest("give queries and documents", field="queries")
    first, second = given[0]
    queries, documents = _listed(request, first, QUERY), _listed(request, second, DOCUMENT)
    if len(queries) not in (1, len(documents)):
        raise InvalidRequest(
            f"{first} has {len(queries)} texts and {second} {len(documents)}; give one of {first}, or as many",
            field=first,
        )
    return queries, documents


def _listed(request: ScoreRequest, field: str, uses: Sequence[str]) -> list[Named]:
    given = getattr(request, field)
    if given is None:
        raise InvalidRequest(f"{field} is required", field=field)
    texts = [given] if isinstance(given, str) else given
    check_count(len(texts), field)
    names = [field if isinstance(given, str) else f"{field}.{index}" for index in range(len(texts))]
    return [Named(filled(text, name), name, uses=uses) for text, name in zip(texts, names, strict=True)]


def _text_of(document: str | TextObject) -> str:
    return document if isinstance(document, str) else document.text


def _cosines(found: Vectors, num_queries: int) -> NDArray[np.float64]:
    """Returns the cosine of each document with its query, which comes before the documents."""
    vectors = normalized(np.concatenate(found.arrays).astype(np.float64))
    cosines: NDArray[np.float64] = (vectors[:num_queries] * vectors[num_queries:]).sum(axis=1)
    return cosines


def _usage(found: Vectors) -> dict[str, int]:
    return {"prompt_tokens": found.usage.prompt_tokens, "total_tokens": found.usage.total_tokens}
