"""Streamed answers as parts of text: of chats and of completions. Knows the API's chunks, and no terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.services.rest.client import RestClient, RestError

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer."""

    text: str = ""
    reasoning: str = ""
    call: str = ""  # a piece of a tool call: its name with "(" first, then its arguments
    finish_reason: str = ""


def first_model(client: RestClient) -> str:
    """Returns the name of the server's first model. Raises RestError."""
    listed = client.get("/v1/models")
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise RestError(f"{client.url}: /v1/models lists no model; give --model NAME", is_final=True) from None


def chat(client: RestClient, model: str, messages: Sequence[Message], fields: Mapping[str, Any]) -> Iterator[Part]:
    """Yields the parts of the answer to these messages. Raises RestError."""
    body = {**fields, "model": model, "messages": list(messages), "stream": True}
    for choice in _choices(client, "/v1/chat/completions", body):
        delta = choice.get("delta") or {}
        yield Part(
            text=delta.get("content") or "",
            reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
            call="".join(_call_text(call) for call in delta.get("tool_calls") or ()),
            finish_reason=choice.get("finish_reason") or "",
        )


def complete(client: RestClient, model: str, prompt: str, fields: Mapping[str, Any]) -> Iterator[Part]:
    """Yields the parts that follow a prompt. Raises RestError."""
    for choice in _choices(client, "/v1/completions", {**fields, "model": model, "prompt": prompt, "stream": True}):
        yield Part(text=choice.get("text") or "", finish_reason=choice.get("finish_reason") or "")


def _choices(client: RestClient, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for chunk in client.events(path, body):
        # The last chunk may hold counters alone.
        yield from (choice for choice in chunk.get("choices") or () if choice.get("index", 0) == 0)


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    name = function.get("name")
    return (f"\n{name} " if name else "") + (function.get("arguments") or "")
