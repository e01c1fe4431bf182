"""The control tokens of a vocabulary, which begin and end turns, and their positions in a text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import AddedToken

# Some vocabularies do not mark the tokens around turns as special.
_CONTROL_SHAPE = re.compile(r"<[|｜].+[|｜]>")

Span = tuple[int, int]


@dataclass(frozen=True)
class ControlTokens:
    """Added tokens that are special or have the form `<|name|>`. Tags such as `<think>` and `<tool_call>` are text."""

    tokens: Mapping[int, AddedToken]  # by id

    @classmethod
    def among(cls, added: Mapping[int, AddedToken]) -> ControlTokens:
        """Returns the control tokens among a tokenizer's added tokens."""
        return cls({token_id: token for token_id, token in added.items() if is_control(token)})

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """Returns the ids of the control tokens by text."""
        return {token.content: token_id for token_id, token in self.tokens.items()}

    def spans(self, text: str) -> list[Span]:
        """Returns the spans of control tokens in a text, left to right, preferring the longest."""
        return [found.span() for found in self._pattern.finditer(text)] if self.tokens else []

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(_pattern_of(self.ids))


def is_control(token: AddedToken) -> bool:
    """Returns whether an added token is a control token."""
    return token.content != "" and (token.special or _CONTROL_SHAPE.fullmatch(token.content) is not None)


def _pattern_of(words: Iterable[str]) -> str:
    """Returns a regex of these words that reads each character of a text once, however many words there are."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branch(root)


def _branch(node: Mapping[str, Any]) -> str:
    branches = [re.escape(char) + _branch(below) for char, below in node.items() if char]
    if not branches:
        return ""
    # Greedy, so that the longer of two words with a common prefix is found.
    return f"(?:{'|'.join(branches)}){'?' if '' in node else ''}"
