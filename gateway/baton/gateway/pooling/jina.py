"""Jina's fields of POST /v1/embeddings: refuses those that are not served, and sets the fields that others equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.gateway.models.served import ServedModel
from baton.gateway.pooling.texts import Named
from baton.gateway.schemas.pooling import EmbeddingRequest
from baton.rpc.errors import InvalidRequest

_FIT = -1  # of truncate_prompt_tokens: as many as the model takes
_REFUSED = {
    "late_chunking": "late_chunking is not supported by this release; leave it out, and send each chunk as a text",
    "return_multivector": 'return_multivector is not supported here; use /pooling with "task": "token_embed"',
}


def adopt_jina(request: EmbeddingRequest) -> None:
    """Sets the equivalent fields. Raises InvalidRequest, which names the field."""
    for name, message in _REFUSED.items():
        if getattr(request, name):
            raise InvalidRequest(message, field=name)
    if request.embedding_type is not None and request.encoding_format is not None:
        raise InvalidRequest("give either embedding_type or encoding_format", field="embedding_type")
    if request.truncate and request.truncate_prompt_tokens is None:
        request.truncate_prompt_tokens = _FIT
    if request.normalized is not None and request.use_activation is None:
        request.use_activation = request.normalized


def with_task(model: ServedModel, texts: Sequence[Named], task: str | None, field: str = "task") -> list[Named]:
    """Returns texts with the use that a request names. Raises InvalidRequest for one that the model has no prompt for.

    Token ids and chats have no prompt, so a use is refused with them.
    """
    if task is None:
        return list(texts)
    if not isinstance(texts[0].text, str):
        raise InvalidRequest(f"{field} is for texts; token ids and chats are embedded as they are", field=field)
    uses = model.text_prompts.names_of(task, field)
    return [replace(text, uses=uses) for text in texts]
