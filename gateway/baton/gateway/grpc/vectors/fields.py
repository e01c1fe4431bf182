"""Fields of requests for vectors in the public gRPC API, as the services have them that REST shares. Makes no calls."""

from __future__ import annotations

from dataclasses import dataclass

from baton.gateway.access_log import is_request_id
from baton.gateway.grpc.chat import Chat, chat_of, encode_chat
from baton.gateway.models.served import ServedModel
from baton.gateway.pooling.texts import Named, check_count, named_texts
from baton.gateway.schemas.pooling import VectorFields
from baton.rpc.errors import InvalidRequest
from baton.v1 import inference_pb2, vectors_pb2

TextsRequest = inference_pb2.EmbedRequest | inference_pb2.ClassifyRequest | inference_pb2.PoolRequest

_FIT = -1  # of truncate_prompt_tokens: as many as the model takes
_CUTS = (vectors_pb2.LONG_TEXTS_KEEP_START, vectors_pb2.LONG_TEXTS_KEEP_END)


@dataclass(frozen=True, slots=True)
class RpcChat:
    """Implements ChatText for a chat of the public messages."""

    chat: Chat

    async def encode(self, model: ServedModel, *, whole: bool) -> list[int]:
        return await encode_chat(model, self.chat, whole)


def fields_of(options: vectors_pb2.VectorOptions, model: ServedModel, *, averages: bool = False) -> VectorFields:
    """Returns the fields that all requests for vectors have. `averages`: of embeddings. Raises InvalidRequest."""
    if options.request_id and not is_request_id(options.request_id):
        message = "invalid request_id; give 1 to 256 visible ASCII characters without spaces"
        raise InvalidRequest(message, field="options.request_id")
    long, most = options.long_texts, options.max_tokens
    if long not in vectors_pb2.LongTexts.values():
        raise InvalidRequest(f"long_texts {long} is unknown", field="options.long_texts")
    if long == vectors_pb2.LONG_TEXTS_AVERAGE and not averages:
        message = "long_texts AVERAGE is for embeddings of whole texts; give another one"
        raise InvalidRequest(message, field="options.long_texts")
    if most and long not in _CUTS:
        message = "max_tokens is for long_texts KEEP_START and KEEP_END; give one of them, or leave max_tokens out"
        raise InvalidRequest(message, field="options.max_tokens")
    if most > (limit := model.require_info().max_model_len):
        message = f"max_tokens is {most}; give 0 to {limit}, as many as the model takes"
        raise InvalidRequest(message, field="options.max_tokens")
    return VectorFields(
        add_special_tokens=not options.omit_special_tokens,
        truncate_prompt_tokens=(most or _FIT) if long in _CUTS else None,
        truncation_side="left" if long == vectors_pb2.LONG_TEXTS_KEEP_END else None,
        enable_chunked_processing=long == vectors_pb2.LONG_TEXTS_AVERAGE,
        use_activation=not options.raw,
        priority=options.priority,
        cache_salt=options.cache_salt or None,
    )


def texts_of(request: TextsRequest, model: ServedModel) -> list[Named]:
    """Returns the texts of a request, each with its field. Raises InvalidRequest, ContextTooLong."""
    num_given = bool(request.texts) + bool(request.token_ids) + request.HasField("chat")
    if num_given != 1:
        raise InvalidRequest("give one of texts, token_ids and chat", field="texts")
    if request.HasField("chat"):
        return [Named(RpcChat(chat_of(request.chat, model.require_info().max_model_len)), "chat")]
    if request.texts:
        return named_texts(request.texts, "texts")
    check_count(len(request.token_ids), "token_ids")
    return [_ids_of(list(one.token_ids), f"token_ids.{index}") for index, one in enumerate(request.token_ids)]


def _ids_of(token_ids: list[int], field: str) -> Named:
    if not token_ids:
        raise InvalidRequest(f"{field} is empty; give at least one token", field=field)
    return Named(token_ids, field)
