"""Converts token ids to text incrementally. Knows nothing of stop strings or streams.

An output's text is what its tokens add to the prompt's text: a leading space is kept if the prompt has text before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.gateway.models.tokenization.token_table import LeadingSpace, TokenTable

_REPLACEMENT = "\ufffd"
# Tokens of context that a decoder needs for correct spaces.
_CONTEXT_TOKENS = 6
# A text that still ends in U+FFFD after this many tokens is invalid rather than incomplete.
_MAX_INCOMPLETE_TOKENS = 16


class Detokenizer(Protocol):
    """The text of one output. `push` returns complete text; `finish` returns the rest."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that they complete."""

    def finish(self) -> str:
        """Returns the rest; an incomplete character becomes U+FFFD."""


class NoText:
    """Implements Detokenizer for requests that need only token ids."""

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class ByteLevelDetokenizer:
    """Implements Detokenizer for byte-level BPE: tokens are bytes of UTF-8 text."""

    __slots__ = ("_decoder", "_fragments", "_pending", "_texts")

    def __init__(self, table: TokenTable, skip_special_tokens: bool) -> None:
        self._texts = table.visible_texts if skip_special_tokens else table.texts
        self._fragments = table.fragments
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = False

    def push(self, token_ids: Sequence[int]) -> str:
        if not self._pending:
            try:
                return "".join(map(self._texts.__getitem__, token_ids))  # type: ignore[arg-type]
            except (TypeError, IndexError):  # a token that is part of a character, or has no text
                pass
        return self._decode(token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        texts, size = self._texts, len(self._texts)
        data = bytearray()
        for token_id in token_ids:
            if token_id < size:
                text = texts[token_id]
                data += self._fragments[token_id] if text is None else text.encode()
        decoded = self._decoder.decode(bytes(data))
        self._pending = bool(self._decoder.getstate()[0])
        return decoded

    def finish(self) -> str:
        self._pending = False
        return self._decoder.decode(b"", final=True)


class ByteFallbackDetokenizer:
    """Implements Detokenizer for SentencePiece-like vocabularies: tokens are text, or single bytes of other
    characters.
    """

    def __init__(self, table: TokenTable, skip_special_tokens: bool, at_start: bool) -> None:
        self._texts = table.visible_texts if skip_special_tokens else table.texts
        self._fragments = table.fragments
        self._leading_space = table.leading_space if at_start else LeadingSpace.KEPT
        self._pending = bytearray()

    def push(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1 and not self._pending and self._leading_space is LeadingSpace.KEPT:
            token_id = token_ids[0]
            if token_id >= len(self._texts):
                return ""
            text = self._texts[token_id]
            if text is not None:
                return text
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def _push_one(self, token_id: int) -> str:
        text = self._texts[token_id] if token_id < len(self._texts) else ""
        broken = ""
        if text is None:
            self._pending += self._fragments[token_id]
            text = self._take_complete()
        elif text:
            broken = self._take_broken()
        if text and self._leading_space is not LeadingSpace.KEPT:
            text = text if broken else self._without_leading_space(text)
            self._leading_space = LeadingSpace.KEPT
        return broken + text

    def _without_leading_space(self, text: str) -> str:
        return text.replace(" ", "") if self._leading_space is LeadingSpace.TOKEN_STRIPPED else text.removeprefix(" ")

    def _take_complete(self) -> str:
        done = ""
        while self._pending:
            try:
                done += self._pending.decode()
                self._pending.clear()
            except UnicodeDecodeError as error:
                if error.end == len(self._pending) and error.reason == "unexpected end of data":
                    break
                done += _REPLACEMENT * (error.end - error.start)
                del self._pending[: error.end]
        return done

    def _take_broken(self) -> str:
        broken = _REPLACEMENT * len(self._pending)
        self._pending.clear()
        return broken

    def finish(self) -> str:
        return self._take_broken()


class PrefixDiffDetokenizer:
    """Implements Detokenizer for all other tokenizers: decodes a short window twice and returns the difference."""

    def __init__(
        self, decode: Callable[[list[int]], str], context: Sequence[int], hidden_ids: frozenset[int] = frozenset()
    ) -> None:
        self._decode = decode
        self._hidden_ids = hidden_ids
        self._window = [token_id for token_id in context if token_id not in hidden_ids][-_CONTEXT_TOKENS:]
        self._emitted = len(self._window)  # tokens of the window whose text was returned

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._hidden_ids])

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        before = self._decode(self._window[: self._emitted])
        after = self._decode(self._window)
        incomplete = after.endswith(_REPLACEMENT) or len(after) <= len(before)
        if incomplete and len(self._window) - self._emitted < _MAX_INCOMPLETE_TOKENS:
            return ""
        return self._advance(before, after)

    def _advance(self, before: str, after: str) -> str:
        del self._window[: max(0, len(self._window) - _CONTEXT_TOKENS)]
        self._emitted = len(self._window)
        return after[len(before) :]

    def finish(self) -> str:
        before = self._decode(self._window[: self._emitted])
        return self._advance(before, self._decode(self._window))
