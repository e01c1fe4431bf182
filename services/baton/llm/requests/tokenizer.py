"""The model's tokenizer for scripts, with the methods that they call on that of Transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.gateway.models.served import ServedModel


class LlmTokenizer:
    """Encodes and decodes as the engine's requests do."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def __len__(self) -> int:
        return self._model.tokenizer.vocab_size

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return self._model.tokenizer.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text."""
        return self._model.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of tokens."""
        return self._model.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """Returns a chat's text, or its token ids. Raises InvalidRequest for messages that the template refuses."""
        text = self._model.template.render(
            conversation, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text
