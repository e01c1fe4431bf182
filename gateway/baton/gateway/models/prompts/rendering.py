"""Renders a chat with its template and encodes it, keeping the client's control tokens apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from baton.gateway.models.prompts.chat_template import ChatTemplate, Message
from baton.gateway.models.prompts.client_text import ClientText, StandIns
from baton.gateway.models.tokenization.encoding_limit import EncodingLimit
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.rpc.errors import ServiceError

_MEASURED_VALUES = 1024
_MANY_CHARS = 1 << 20


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered prompt, in its original form and with stand-ins."""

    text: str
    written: str  # the same length, with stand-ins in client text


@dataclass(frozen=True, slots=True)
class ChatRendering:
    """The settings for rendering a chat."""

    template: ChatTemplate
    client_text: ClientText | None  # None: control tokens in client text are trusted
    add_generation_prompt: bool
    continue_final_message: bool

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        defaults: Mapping[str, Any],
        edge: str = "",
    ) -> Rendered:
        """Returns the prompt. `defaults` are the operator's variables. Raises InvalidRequest."""
        cover = StandIns()
        if self.client_text is not None:
            cover = self.client_text.cover(messages, tools, documents, variables)
        try:
            written = self.template.render(
                cover.covered(messages),
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                tools=cover.covered(tools),
                documents=cover.covered(documents),
                variables={**defaults, **cover.covered(variables or {})},
                stand_ins=list(cover.stand_ins.values()),
                edge=edge,
            )
        except ServiceError as error:
            error.message = cover.uncovered(error.message)
            raise
        return Rendered(cover.uncovered(written), written)


def encode_rendered(
    prompt: Rendered, tokenizer: Tokenizer, add_special_tokens: bool, owner: str, limit: EncodingLimit
) -> list[int]:
    """Returns the prompt's token ids, with the template's control tokens only. Raises as Tokenizer.encode."""
    tokenizer.bound.check_size(prompt.text, limit)
    control = tokenizer.control_tokens
    if prompt.written != prompt.text and control.spans(prompt.written) != control.spans(prompt.text):
        return tokenizer.encode_plain(prompt.text, prompt.written, add_special_tokens=add_special_tokens, limit=limit)
    return tokenizer.encode(prompt.text, add_special_tokens=add_special_tokens, owner=owner, limit=limit)


def size_of(chat: Sequence[Any]) -> int:
    """Returns the approximate number of characters of a chat; a large number if it has many values."""
    size = num_values = 0
    waiting = list(chat)
    while waiting and num_values < _MEASURED_VALUES:
        value = waiting.pop()
        num_values += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            num_values += len(value)
            waiting.extend(islice(value.values(), _MEASURED_VALUES))
        elif isinstance(value, list | tuple):
            waiting.extend(islice(value, _MEASURED_VALUES))
    return max(_MANY_CHARS, size) if num_values >= _MEASURED_VALUES else size
