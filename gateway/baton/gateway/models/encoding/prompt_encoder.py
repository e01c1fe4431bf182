"""Turns prompts into token ids: renders chats and encodes texts.

The same code runs in the gateway and in the process that encodes long prompts.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from msgspec import Struct

from baton.gateway.models.prompts.assistant_mask import mask_of, split_edges
from baton.gateway.models.prompts.chat_template import ChatTemplate
from baton.gateway.models.prompts.client_text import ClientText
from baton.gateway.models.prompts.rendering import ChatRendering, Rendered, encode_rendered, size_of
from baton.gateway.models.tokenization.encoding_limit import EncodingLimit
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.rpc.errors import InvalidRequest

_MAX_CLIENTS_TEMPLATES = 16  # compiled templates of clients


class TextPrompt(Struct, frozen=True, tag="text"):
    """A plain text; control tokens in it are honored."""

    text: str
    add_special_tokens: bool

    @property
    def num_chars(self) -> int:
        """Returns the text's length in characters."""
        return len(self.text)


class ChatPrompt(Struct, frozen=True, tag="chat"):
    """A chat, and how it is rendered."""

    messages: Any  # a sequence of mappings
    tools: Any = None
    documents: Any = None
    variables: Any = None  # of the client
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template: str | None = None  # the client's own; None: the model's

    @property
    def num_chars(self) -> int | None:
        """Returns the approximate size, or None if it is unknown: a client's template may write any number."""
        if self.template is not None:
            return None
        return size_of((self.messages, self.tools, self.documents, self.variables))


class PromptEncoder:
    """Encodes prompts for one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        variables: Mapping[str, Any] | None = None,
        trust_control_tokens: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._variables = dict(variables or {})  # the operator's, which requests may override
        self._trust_control_tokens = trust_control_tokens
        self._client_texts: WeakKeyDictionary[ChatTemplate, ClientText] = WeakKeyDictionary()
        # By owner and text, least recently used first.
        self._clients_templates: OrderedDict[tuple[str, str], ChatTemplate] = OrderedDict()

    def encode(self, prompt: TextPrompt | ChatPrompt, owner: str, limit: EncodingLimit) -> list[int]:
        """Returns the token ids. Raises InvalidRequest, and TooManyTokens or EncodingStopped by the limit."""
        if isinstance(prompt, TextPrompt):
            special = prompt.add_special_tokens
            return self.tokenizer.encode(prompt.text, add_special_tokens=special, owner=owner, limit=limit)
        rendered = self._rendered(prompt, owner)
        return encode_rendered(rendered, self.tokenizer, prompt.add_special_tokens, owner, limit)

    def assistant_mask(
        self, prompt: ChatPrompt, token_ids: Sequence[int], owner: str, limit: EncodingLimit
    ) -> list[int]:
        """Returns 1 for each token of an encoded chat that is the assistant's, otherwise 0. Raises InvalidRequest."""
        edge = f"edge-{secrets.token_hex(16)}"
        text, spans = split_edges(self._rendered(prompt, owner, edge).text, edge)
        self.tokenizer.bound.check_size(text, limit)
        found, offsets = self.tokenizer.with_offsets(text, prompt.add_special_tokens)
        if found != list(token_ids):
            raise InvalidRequest(
                "a message contains the text of a control token; the assistant's tokens cannot be marked",
                field="return_assistant_tokens_mask",
            )
        return mask_of(offsets, spans)

    def _rendered(self, prompt: ChatPrompt, owner: str, edge: str = "") -> Rendered:
        template = self.template if prompt.template is None else self._clients_template(owner, prompt.template)
        rendering = ChatRendering(
            template, self._client_text(template), prompt.add_generation_prompt, prompt.continue_final_message
        )
        chat = (prompt.messages, prompt.tools, prompt.documents, prompt.variables)
        return rendering.render(*chat, self._variables, edge)

    def _client_text(self, template: ChatTemplate) -> ClientText | None:
        """Returns the covering of client text for a template, or None if control tokens are trusted."""
        if self._trust_control_tokens:
            return None
        found = self._client_texts.get(template)
        if found is None:
            found = self._client_texts[template] = ClientText(self.tokenizer.control_tokens, template.literals)
        return found

    def _clients_template(self, owner: str, text: str) -> ChatTemplate:
        """Returns a request's template, compiled and cached."""
        templates, key = self._clients_templates, (owner, text)
        found = templates.pop(key, None)
        if found is None:
            try:
                found = ChatTemplate({"default": text}, self.template.special_tokens, "the request")
            except InvalidRequest as error:
                error.field = "chat_template"
                raise
        templates[key] = found
        if len(templates) > _MAX_CLIENTS_TEMPLATES:
            templates.popitem(last=False)
        return found
