"""The texts of a request for vectors as token ids, within what the model takes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.gateway.errors.http import ContextTooLong
from baton.gateway.fields.chat import check_chat_size, check_messages, template_messages
from baton.gateway.fields.validation import check_variables
from baton.gateway.models.prompts.context_length import context_too_long
from baton.gateway.models.sampling import check_prompt_ids
from baton.gateway.models.served import ServedModel
from baton.gateway.schemas.pooling import TextFields, VectorFields
from baton.gateway.schemas.requests import ChatMessage
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

MAX_TEXTS = 2048
MAX_TOKENS = 1 << 20  # of all texts together


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat in place of a text."""

    messages: Sequence[ChatMessage]
    add_generation_prompt: bool
    variables: Mapping[str, Any] | None


Text = str | list[int] | Chat


@dataclass(frozen=True, slots=True)
class Named:
    """A text, and its field in the request."""

    text: Text
    field: str
    most: int = 0  # tokens that are kept; 0: as the request says


def texts_of(request: TextFields) -> list[Named]:
    """Returns the texts of `input`, or the chat. Raises InvalidRequest for none, too many, or mixed forms."""
    given = request.input
    if (given is None) == (request.messages is None):
        raise InvalidRequest("give either input or messages", field="input")
    if request.messages is not None:
        check_messages(request.messages)
        check_variables(request.chat_template_kwargs)
        chat = Chat(request.messages, bool(request.add_generation_prompt), request.chat_template_kwargs)
        return [Named(chat, "messages")]
    texts: list[Any] = [given] if isinstance(given, str) or _is_one_list(given) else list(given or ())
    check_count(len(texts), "input")
    kind = type(texts[0])
    named = [Named(text, "input" if len(texts) == 1 else f"input.{index}") for index, text in enumerate(texts)]
    for each in named:
        if type(each.text) is not kind or isinstance(each.text, int):
            message = f"{each.field} has another type than input.0; give texts, token ids, or lists of token ids"
            raise InvalidRequest(message, field=each.field)
        if not each.text:
            raise InvalidRequest(f"{each.field} is empty; give at least one character or token", field=each.field)
    return named


def check_count(count: int, field: str) -> None:
    """Raises InvalidRequest for no texts, or too many."""
    if not 1 <= count <= MAX_TEXTS:
        raise InvalidRequest(f"{field} has {count} texts; give 1 to {MAX_TEXTS}", field=field)


def _is_one_list(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(isinstance(one, int) for one in given)


async def encode_texts(model: ServedModel, request: VectorFields, texts: Sequence[Named]) -> list[list[int]]:
    """Returns the token ids of each text. Raises InvalidRequest, which names the text."""
    info = model.require_info()
    most = longest(request, info)
    encoded: list[list[int]] = []
    total = 0
    for named in texts:
        await asyncio.sleep(0)  # short texts are encoded here, so other tasks run in between
        token_ids = await _encode(model, request, named, info)
        kept = min(most, named.most or most)
        if len(token_ids) > kept:
            if request.truncate_prompt_tokens is None and not named.most:
                raise context_too_long(len(token_ids), most, named.field)
            token_ids = await _truncated(model, request, named.text, token_ids, kept)
        total += len(token_ids)
        if total > MAX_TOKENS:
            message = f"the texts have over {MAX_TOKENS} tokens together; send fewer at once"
            raise InvalidRequest(message, field=named.field.partition(".")[0])
        encoded.append(token_ids)
    return encoded


def longest(request: VectorFields, info: types_pb2.ModelInfo) -> int:
    """Returns the most tokens of a text. Raises InvalidRequest for a wrong limit."""
    wanted = request.truncate_prompt_tokens
    if wanted is None or wanted == -1:
        return info.max_model_len
    if not 1 <= wanted <= info.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {wanted}; give -1, or 1 to {info.max_model_len}", field="truncate_prompt_tokens"
        )
    return wanted


async def _encode(model: ServedModel, request: VectorFields, named: Named, info: types_pb2.ModelInfo) -> list[int]:
    text = named.text
    whole = request.truncate_prompt_tokens is not None or bool(named.most)
    try:
        if isinstance(text, list):
            check_prompt_ids(text, info.vocab_size)
            return text
        if isinstance(text, str):
            special = request.add_special_tokens is not False
            return await model.encode_text(text, add_special_tokens=special, whole=whole)
        check_chat_size(text.messages, info.max_model_len, 0)
        return await model.encode_chat(
            template_messages(text.messages),
            add_generation_prompt=text.add_generation_prompt,
            variables=text.variables,
            add_special_tokens=bool(request.add_special_tokens),
            whole=whole,
        )
    except (ContextTooLong, InvalidRequest) as error:
        error.field = named.field
        raise


async def _truncated(
    model: ServedModel, request: VectorFields, text: Text, token_ids: list[int], most: int
) -> list[int]:
    """Returns the start of a text, with the special tokens at its end, as models were trained on them."""
    end: list[int] = []
    if isinstance(text, str) and request.add_special_tokens is not False:
        plain = await model.encode_text(text, add_special_tokens=False, whole=True)
        start = next((at for at in range(len(token_ids)) if token_ids[at : at + len(plain)] == plain), 0)
        end = token_ids[start + len(plain) :]
    kept = token_ids[: max(0, most - len(end))]
    return [*kept, *end][:most]
