"""The texts of a request for vectors as token ids, within what the model takes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from baton.gateway.errors.http import ContextTooLong
from baton.gateway.fields.chat import check_chat_size, check_messages, template_messages
from baton.gateway.fields.validation import check_variables
from baton.gateway.models.prompts.context_length import context_too_long
from baton.gateway.models.sampling import check_prompt_ids
from baton.gateway.models.served import ServedModel
from baton.gateway.schemas.pooling import TextFields
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

Text = str | list[int]
MAX_TEXTS = 2048
_MAX_TOKENS = 1 << 20  # of all texts together


def texts_of(request: TextFields) -> list[Text]:
    """Returns the texts of `input`. Raises InvalidRequest for none, too many, empty ones or mixed forms."""
    given = request.input
    if (given is None) == (request.messages is None):
        raise InvalidRequest("give either input or messages", field="input")
    if given is None:
        return []
    texts: list[Text]
    if isinstance(given, str):
        texts = [given]
    elif given and all(isinstance(one, int) for one in given):
        texts = [given]  # type: ignore[list-item]
    else:
        texts = given  # type: ignore[assignment]
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise InvalidRequest(f"input has {len(texts)} texts; give 1 to {MAX_TEXTS}", field="input")
    kind = type(texts[0])
    for index, text in enumerate(texts):
        place = "input" if isinstance(given, str) or texts[0] is given else f"input.{index}"
        if type(text) is not kind or isinstance(text, int):
            message = f"{place} has another type than input.0; give texts, token ids, or lists of token ids"
            raise InvalidRequest(message, field=place)
        if not text:
            raise InvalidRequest(f"{place} is empty; give at least one character or token", field=place)
    return texts


async def encode_texts(model: ServedModel, request: TextFields, texts: Sequence[Text]) -> list[list[int]]:
    """Returns the token ids of each text, or of the chat. Raises InvalidRequest, which names the text."""
    info = model.require_info()
    if request.messages is not None:
        return [await _encode_chat(model, request, info)]
    most = _most(request, info)
    encoded: list[list[int]] = []
    total = 0
    for index, text in enumerate(texts):
        await asyncio.sleep(0)  # short texts are encoded here, so other tasks run in between
        field = "input" if len(texts) == 1 else f"input.{index}"
        token_ids = await _encode(model, request, text, info, field)
        if len(token_ids) > most:
            if request.truncate_prompt_tokens is None:
                raise context_too_long(len(token_ids), most, field)
            token_ids = await _truncated(model, request, text, token_ids, most)
        total += len(token_ids)
        if total > _MAX_TOKENS:
            raise InvalidRequest(
                f"the texts have over {_MAX_TOKENS} tokens together; send fewer at once", field="input"
            )
        encoded.append(token_ids)
    return encoded


def _most(request: TextFields, info: types_pb2.ModelInfo) -> int:
    wanted = request.truncate_prompt_tokens
    if wanted is None or wanted == -1:
        return info.max_model_len
    if not 1 <= wanted <= info.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {wanted}; give -1, or 1 to {info.max_model_len}", field="truncate_prompt_tokens"
        )
    return wanted


async def _encode(
    model: ServedModel, request: TextFields, text: Text, info: types_pb2.ModelInfo, field: str
) -> list[int]:
    if isinstance(text, list):
        try:
            check_prompt_ids(text, info.vocab_size)
        except InvalidRequest as error:
            error.field = field
            raise
        return text
    try:
        return await model.encode_text(
            text,
            add_special_tokens=request.add_special_tokens is not False,
            whole=request.truncate_prompt_tokens is not None,
        )
    except ContextTooLong as error:
        error.field = field
        raise


async def _truncated(model: ServedModel, request: TextFields, text: Text, token_ids: list[int], most: int) -> list[int]:
    """Returns the start of a text, with the special tokens at its end, as models were trained on them."""
    end: list[int] = []
    if isinstance(text, str) and request.add_special_tokens is not False:
        plain = await model.encode_text(text, add_special_tokens=False, whole=True)
        start = next((at for at in range(len(token_ids)) if token_ids[at : at + len(plain)] == plain), 0)
        end = token_ids[start + len(plain) :]
    kept = token_ids[: max(0, most - len(end))]
    return [*kept, *end][:most]


async def _encode_chat(model: ServedModel, request: TextFields, info: types_pb2.ModelInfo) -> list[int]:
    messages = request.messages or []
    check_messages(messages)
    check_variables(request.chat_template_kwargs)
    check_chat_size(messages, info.max_model_len, 0)
    return await model.encode_chat(
        template_messages(messages),
        add_generation_prompt=bool(request.add_generation_prompt),
        variables=request.chat_template_kwargs,
        add_special_tokens=bool(request.add_special_tokens),
    )
