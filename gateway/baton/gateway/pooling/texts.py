"""The texts of a request for vectors, each with its field's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.gateway.fields.chat import check_chat_size, check_messages, template_messages
from baton.gateway.fields.validation import check_variables
from baton.gateway.models.served import ServedModel
from baton.gateway.schemas.pooling import TextFields, TextObject
from baton.gateway.schemas.requests import ChatMessage
from baton.rpc.errors import InvalidRequest

MAX_TEXTS = 2048


class ChatText(Protocol):
    """A chat in place of a text."""

    async def encode(self, model: ServedModel, *, whole: bool) -> list[int]:
        """Returns its token ids. `whole` allows more than the model takes. Raises ContextTooLong, InvalidRequest."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Implements ChatText for a chat of REST."""

    messages: Sequence[ChatMessage]
    add_generation_prompt: bool
    variables: Mapping[str, Any] | None
    add_special_tokens: bool

    async def encode(self, model: ServedModel, *, whole: bool) -> list[int]:
        check_chat_size(self.messages, model.require_info().max_model_len, 0)
        return await model.encode_chat(
            template_messages(self.messages),
            add_generation_prompt=self.add_generation_prompt,
            variables=self.variables,
            add_special_tokens=self.add_special_tokens,
            whole=whole,
        )


Text = str | list[int] | ChatText


@dataclass(frozen=True, slots=True)
class Named:
    """A text, and its field in the request."""

    text: Text
    field: str
    most: int = 0  # tokens that are kept; 0: as the request says
    uses: Sequence[str] = ()  # names of the prompt in front of it, the likely ones first; empty: the model's default


def texts_of(request: TextFields) -> list[Named]:
    """Returns the texts of `input`, or the chat. Raises InvalidRequest for none, too many, or mixed forms."""
    given = request.input
    if (given is None) == (request.messages is None):
        raise InvalidRequest("give either input or messages", field="input")
    if request.messages is not None:
        check_messages(request.messages)
        check_variables(request.chat_template_kwargs)
        opens, special = bool(request.add_generation_prompt), bool(request.add_special_tokens)
        return [Named(Chat(request.messages, opens, request.chat_template_kwargs, special), "messages")]
    is_one = isinstance(given, str) or _is_one_list(given)
    texts: list[Any] = [given] if is_one else list(given or ())
    check_count(len(texts), "input")
    texts = [text.text if isinstance(text, TextObject) else text for text in texts]
    kind = type(texts[0])
    named = [Named(text, "input" if is_one else f"input.{index}") for index, text in enumerate(texts)]
    for each in named:
        if type(each.text) is not kind:
            message = f"{each.field} has another type than input.0; give texts, token ids, or lists of token ids"
            raise InvalidRequest(message, field=each.field)
    for each in named:
        if not each.text:
            raise InvalidRequest(f"{each.field} is empty; give at least one character or token", field=each.field)
    return named


def check_count(count: int, field: str) -> None:
    """Raises InvalidRequest for no texts, or too many."""
    if not 1 <= count <= MAX_TEXTS:
        raise InvalidRequest(f"{field} has {count} texts; give 1 to {MAX_TEXTS}", field=field)


def filled(text: str, field: str) -> str:
    """Returns the text. Raises InvalidRequest if it is empty."""
    if not text:
        raise InvalidRequest(f"{field} is empty; give at least one character", field=field)
    return text


def named_texts(texts: Sequence[str], field: str, uses: Sequence[str] = (), most: int = 0) -> list[Named]:
    """Returns texts, each named by its place in the field. Raises InvalidRequest for none, too many, or empty ones."""
    check_count(len(texts), field)
    places = [f"{field}.{index}" for index in range(len(texts))]
    return [Named(filled(text, place), place, most, uses) for text, place in zip(texts, places, strict=True)]


def _is_one_list(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(isinstance(one, int) for one in given)
