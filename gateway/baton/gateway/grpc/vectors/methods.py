"""The methods of the public gRPC API for vectors: Embed, Score, Rerank, Classify and Pool."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator

from baton.gateway.grpc.vectors.calls import VectorCalls
from baton.gateway.grpc.vectors.fields import fields_of, texts_of
from baton.gateway.grpc.vectors.messages import embed_responses, pool_responses, usage_of, vector_of
from baton.gateway.models.served import ServedModel
from baton.gateway.models.tasks import check_dimensions
from baton.gateway.models.text_prompts import DOCUMENT, QUERY
from baton.gateway.pooling.jina import with_task
from baton.gateway.pooling.scoring import check_counts, ranked, scoring_of
from baton.gateway.pooling.texts import Named, filled, named_texts
from baton.gateway.pooling.vectors import Wanted, require_task
from baton.rpc.errors import InvalidRequest
from baton.rpc.server.server import Context
from baton.v1 import inference_pb2, types_pb2, vectors_pb2

_EMBED = types_pb2.POOLING_TASK_EMBED
_CLASSIFY = types_pb2.POOLING_TASK_CLASSIFY


class VectorMethods:
    """The methods of InferenceService for vectors."""

    @property
    @abstractmethod
    def _vectors(self) -> VectorCalls:
        """Returns the calls. Raises Unsupported without them."""

    async def Embed(  # noqa: N802
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> AsyncIterator[vectors_pb2.EmbedResponse]:
        calls = self._vectors
        async with calls.answering("Embed", request, context) as call:
            model = calls.model(call, request)
            dimensions = check_dimensions(request.dimensions or None, require_task(model, _EMBED))
            texts = with_task(model, texts_of(request, model), request.use or None, "use")
            params = types_pb2.PoolingParams(task=_EMBED, dimensions=dimensions)
            options = request.options
            wanted = Wanted(fields_of(options, model, averages=True), model, texts, params, options.timeout_ms)
            for response in embed_responses(call.request_id, await calls.compute(call, context, wanted)):
                yield response

    async def Score(  # noqa: N802
        self, request: vectors_pb2.ScoreRequest, context: Context
    ) -> vectors_pb2.ScoreResponse:
        calls = self._vectors
        async with calls.answering("Score", request, context) as call:
            model, options = calls.model(call, request), request.options
            queries = named_texts(request.queries, "queries", QUERY)
            documents = named_texts(request.documents, "documents", DOCUMENT)
            check_counts(len(queries), len(documents), "queries", "documents")
            scoring = scoring_of(model, fields_of(options, model), queries, documents, options.timeout_ms)
            found = await calls.compute(call, context, scoring.wanted)
            scores = scoring.scores(found).tolist()
            return vectors_pb2.ScoreResponse(request_id=call.request_id, scores=scores, usage=usage_of(found))

    async def Rerank(  # noqa: N802
        self, request: vectors_pb2.RerankRequest, context: Context
    ) -> vectors_pb2.RerankResponse:
        calls = self._vectors
        async with calls.answering("Rerank", request, context) as call:
            model, options = calls.model(call, request), request.options
            queries = [Named(filled(request.query, "query"), "query", uses=QUERY)]
            documents = named_texts(request.documents, "documents", DOCUMENT, request.max_document_tokens)
            scoring = scoring_of(model, fields_of(options, model), queries, documents, options.timeout_ms)
            found = await calls.compute(call, context, scoring.wanted)
            scores = scoring.scores(found)
            results = [
                vectors_pb2.RankedDocument(index=index, score=scores[index]) for index in ranked(scores, request.top_n)
            ]
            return vectors_pb2.RerankResponse(request_id=call.request_id, results=results, usage=usage_of(found))

    async def Classify(  # noqa: N802
        self, request: inference_pb2.ClassifyRequest, context: Context
    ) -> vectors_pb2.ClassifyResponse:
        calls = self._vectors
        async with calls.answering("Classify", request, context) as call:
            model, options = calls.model(call, request), request.options
            labels = require_task(model, _CLASSIFY).labels
            texts, params = texts_of(request, model), types_pb2.PoolingParams(task=_CLASSIFY)
            wanted = Wanted(fields_of(options, model), model, texts, params, options.timeout_ms)
            found = await calls.compute(call, context, wanted)
            scores = [vector_of(array[0]) for array in found.arrays]
            return vectors_pb2.ClassifyResponse(
                request_id=call.request_id, labels=labels, scores=scores, usage=usage_of(found)
            )

    async def Pool(  # noqa: N802
        self, request: inference_pb2.PoolRequest, context: Context
    ) -> AsyncIterator[vectors_pb2.PoolResponse]:
        calls = self._vectors
        async with calls.answering("Pool", request, context) as call:
            model, options = calls.model(call, request), request.options
            params = _pooling_params(request, model)
            fields = fields_of(options, model, averages=params.task == _EMBED)
            wanted = Wanted(fields, model, texts_of(request, model), params, options.timeout_ms)
            for response in pool_responses(call.request_id, await calls.compute(call, context, wanted)):
                yield response


def _pooling_params(request: inference_pb2.PoolRequest, model: ServedModel) -> types_pb2.PoolingParams:
    """Returns what workers compute for Pool. Raises InvalidRequest."""
    if request.task not in types_pb2.PoolingTask.values():
        raise InvalidRequest(f"task {request.task} is unknown", field="task")
    tasks = model.require_info().pooler.tasks
    task = request.task or (tasks[0] if tasks else _EMBED)
    pooler = require_task(model, task)
    if request.dimensions and pooler.labels:
        raise InvalidRequest("dimensions is not for scores of classes; leave it out", field="dimensions")
    return types_pb2.PoolingParams(task=task, dimensions=check_dimensions(request.dimensions or None, pooler))
