"""POST /v2/embed: embeddings in one or more types, as Cohere's clients send and read them."""

from __future__ import annotations

from typing import Any

import orjson
from msgspec import to_builtins

from baton.gateway.http.exchange import Exchange
from baton.gateway.models.tasks import check_dimensions
from baton.gateway.pooling.jina import with_task
from baton.gateway.pooling.texts import Named, named_texts
from baton.gateway.pooling.vectors import VectorService, Wanted, require_task
from baton.gateway.pooling.written import written
from baton.gateway.schemas.embed_by_type import EmbedByTypeRequest, EmbedInput
from baton.gateway.schemas.pooling import BilledUnits, CohereMeta
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

_FIT = -1  # of truncate_prompt_tokens: as many as the model takes


class EmbedByType:
    """Handles POST /v2/embed."""

    def __init__(self, service: VectorService) -> None:
        self._service = service
        self._decoder = service.decoder(EmbedByTypeRequest)

    async def __call__(self, exchange: Exchange) -> None:
        service = self._service
        with service.serving.counting_rejections():
            request, model, texts = await service.read(exchange, self._decoder, _texts_of)
            pooler = require_task(model, types_pb2.POOLING_TASK_EMBED)
            dimensions = check_dimensions(request.output_dimension, pooler, "output_dimension")
            params = types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_EMBED, dimensions=dimensions)
            _adopt(request, model.require_info().max_model_len)
            texts = with_task(model, texts, request.input_type, "input_type")
            found = await service.answer(exchange, Wanted(request, model, texts, params))
        if found is None:
            return
        body: dict[str, Any] = {
            "id": f"embd-{exchange.request_id}",
            "response_type": "embeddings_by_type",
            "embeddings": {
                kind: [written(vectors[0], kind) for vectors in found.arrays]
                for kind in dict.fromkeys(request.embedding_types or ("float",))
            },
            "texts": _plain(request),
            "meta": to_builtins(CohereMeta(BilledUnits(input_tokens=found.usage.prompt_tokens))),
        }
        exchange.respond(200, orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))


def _texts_of(request: EmbedByTypeRequest) -> list[Named]:
    if request.images is not None:
        raise InvalidRequest("images are not embedded by this release; give texts", field="images")
    if (request.texts is None) == (request.inputs is None):
        raise InvalidRequest("give either texts or inputs", field="texts")
    field = "texts" if request.texts is not None else "inputs"
    return named_texts(_plain(request), field)


def _plain(request: EmbedByTypeRequest) -> list[str]:
    if request.texts is not None:
        return request.texts
    return [_text_of(one, f"inputs.{index}") for index, one in enumerate(request.inputs or ())]


def _text_of(given: EmbedInput, field: str) -> str:
    for index, part in enumerate(given.content):
        if part.type != "text" or part.text is None:
            place = f"{field}.content.{index}"
            raise InvalidRequest(f"{place} is {part.type}; this release embeds parts of type text", field=place)
    return "\n".join(part.text or "" for part in given.content)


def _adopt(request: EmbedByTypeRequest, max_model_len: int) -> None:
    """Sets how long texts are cut, as Cohere's fields say."""
    if request.truncate_prompt_tokens is not None or request.enable_chunked_processing:
        return
    most = request.max_tokens
    if request.truncate == "NONE":
        if most is not None:
            message = "max_tokens cuts texts, which truncate NONE forbids; leave one of them out"
            raise InvalidRequest(message, field="max_tokens")
        return
    request.truncate_prompt_tokens = _FIT if most is None else min(most, max_model_len)
    request.truncation_side = "left" if request.truncate == "START" else "right"
