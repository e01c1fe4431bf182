"""The texts of a request for vectors, each with its field's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.gateway.fields.chat import check_messages
from baton.gateway.fields.validation import check_variables
from baton.gateway.schemas.pooling import TextFields, TextObject
from baton.gateway.schemas.requests import ChatMessage
from baton.rpc.errors import InvalidRequest

MAX_TEXTS = 2048


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
    uses: Sequence[str] = ()  # names of the prompt in front of it, the likely ones first; empty: the model's default


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
    texts = [text.text if isinstance(text, TextObject) else text for text in texts]
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


def filled(text: str, field: str) -> str:
    """Returns the text. Raises InvalidRequest if it is empty."""
    if not text:
        raise InvalidRequest(f"{field} is empty; give at least one character", field=field)
    return text


def _is_one_list(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(isinstance(one, int) for one in given)
