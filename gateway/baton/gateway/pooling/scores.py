"""The routes for scores of pairs: POST /score and /rerank, by a cross-encoder or the cosine of two embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson
from msgspec import to_builtins

from baton.gateway.http.exchange import Exchange
from baton.gateway.models.text_prompts import DOCUMENT, QUERY
from baton.gateway.pooling.scoring import check_counts, ranked, scoring_of
from baton.gateway.pooling.texts import Named, filled, named_texts
from baton.gateway.pooling.vectors import Vectors, VectorService
from baton.gateway.schemas.pooling import BilledUnits, CohereMeta, RerankRequest, ScoreRequest, TextObject
from baton.rpc.errors import InvalidRequest

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
            scoring = scoring_of(model, request, queries, documents)
            found = await service.answer(exchange, scoring.wanted)
        if found is None:
            return
        scores = scoring.scores(found).tolist()
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
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
            scoring = scoring_of(model, request, texts[:1], texts[1:])
            found = await service.answer(exchange, scoring.wanted)
        if found is None:
            return
        scores = scoring.scores(found)
        shows = request.return_documents if request.return_documents is not None else not self._cohere
        results = [
            {"index": index, "relevance_score": float(scores[index])}
            | ({"document": {"text": _text_of(request.documents[index])}} if shows else {})
            for index in ranked(scores, request.top_n)
        ]
        body: dict[str, Any] = {"id": f"rerank-{exchange.request_id}", "model": model.name, "results": results}
        if self._cohere:
            body["meta"] = to_builtins(CohereMeta(BilledUnits(search_units=1)))
        exchange.respond(200, orjson.dumps({**body, "usage": _usage(found)}))

    def _texts_of(self, request: RerankRequest) -> list[Named]:
        most = request.max_tokens_per_doc or (_COHERE_TOKENS if self._cohere else 0)
        documents = [_text_of(document) for document in request.documents]
        return [Named(request.query, "query", uses=QUERY), *named_texts(documents, "documents", DOCUMENT, most)]


def _pairs_of(request: ScoreRequest) -> tuple[list[Named], list[Named]]:
    """Returns queries and documents; of one query, it alone. Raises InvalidRequest."""
    given = [
        (one, two) for one, two in _NAMES if getattr(request, one) is not None or getattr(request, two) is not None
    ]
    if len(given) != 1:
        raise InvalidRequest("give queries and documents", field="queries")
    first, second = given[0]
    queries, documents = _listed(request, first, QUERY), _listed(request, second, DOCUMENT)
    check_counts(len(queries), len(documents), first, second)
    return queries, documents


def _listed(request: ScoreRequest, field: str, uses: Sequence[str]) -> list[Named]:
    given = getattr(request, field)
    if given is None:
        raise InvalidRequest(f"{field} is required", field=field)
    if isinstance(given, str):
        return [Named(filled(given, field), field, uses=uses)]
    return named_texts(given, field, uses)


def _text_of(document: str | TextObject) -> str:
    return document if isinstance(document, str) else document.text


def _usage(found: Vectors) -> dict[str, int]:
    return {"prompt_tokens": found.usage.prompt_tokens, "total_tokens": found.usage.total_tokens}
