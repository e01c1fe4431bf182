"""The text or bytes of every token id, computed once, for tokenizers whose decoding is a concatenation."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Joining(enum.Enum):
    """How the bytes of tokens become text."""

    BYTE_LEVEL = "byte_level"  # all tokens are bytes; invalid UTF-8 becomes U+FFFD
    BYTE_FALLBACK = "byte_fallback"  # tokens are text or single bytes; each invalid byte becomes U+FFFD


class LeadingSpace(enum.Enum):
    """How the space at the start of a text is handled."""

    KEPT = "kept"
    ONE_STRIPPED = "one_stripped"  # one space of the whole text
    TOKEN_STRIPPED = "token_stripped"  # every space of the first token


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The text of every token id. Ids beyond the table or without a token have no text."""

    joining: Joining
    leading_space: LeadingSpace
    texts: list[str | None]  # None: incomplete characters, see `fragments`
    visible_texts: list[str | None]  # the same with special tokens empty
    fragments: Mapping[int, bytes]
    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token."""
        if token_id >= len(self.texts):
            return b""
        text = self.texts[token_id]
        return self.fragments[token_id] if text is None else text.encode()

    def showing(self, token_ids: frozenset[int]) -> TokenTable:
        """Returns a copy with these special tokens visible."""
        if not token_ids:
            return self
        visible = list(self.visible_texts)
        for token_id in token_ids:
            visible[token_id] = self.texts[token_id]
        return replace(self, visible_texts=visible)


@dataclass(frozen=True, slots=True)
class _Rule:
    joining: Joining
    leading_space: LeadingSpace
    to_bytes: Callable[[str], bytes]  # of a token's name
    is_fragment: Callable[[str], bool]  # whether the name stands for a single byte


def build_token_table(tokenizer: RustTokenizer) -> TokenTable | None:
    """Returns the table, or None if decoding is more than a concatenation (WordPiece, CTC, ...)."""
    rule = _rule_of(_decoder_state(tokenizer))
    if rule is None:
        return None
    added = tokenizer.get_added_tokens_decoder()
    names = {token_id: name for name, token_id in tokenizer.get_vocab(with_added_tokens=False).items()}
    names |= {token_id: token.content for token_id, token in added.items()}
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    texts: list[str | None] = [""] * (max(names, default=-1) + 1)
    fragments: dict[int, bytes] = {}
    for token_id, name in names.items():
        data = rule.to_bytes(name)
        text = None if rule.is_fragment(name) else _as_text(data)
        texts[token_id] = text
        if text is None:
            fragments[token_id] = data
    visible = list(texts)
    for token_id in special:
        visible[token_id] = ""
    return TokenTable(rule.joining, rule.leading_space, texts, visible, fragments, special)


def _as_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _decoder_state(tokenizer: RustTokenizer) -> list[dict[str, Any]]:
    """Returns the decoder's steps as in tokenizer.json, with sequences flattened."""
    if tokenizer.decoder is None:
        return []
    return list(_flatten(json.loads(tokenizer.decoder.__getstate__())))


def _flatten(state: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if state["type"] != "Sequence":
        yield state
        return
    for step in state["decoders"]:
        yield from _flatten(step)


def _rule_of(steps: list[dict[str, Any]]) -> _Rule | None:
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _Rule(Joining.BYTE_LEVEL, LeadingSpace.KEPT, _byte_level_bytes, lambda name: False)
    replacements: list[tuple[str, str]] = []
    leading_space = LeadingSpace.KEPT
    byte_fallback = False
    rest = list(steps)
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        step = rest.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    if rest and rest[0]["type"] == "ByteFallback":
        rest.pop(0)
        byte_fallback = True
    if rest and rest[0]["type"] == "Fuse":
        rest.pop(0)
        if rest and rest[0] | {"type": "Strip"} == {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
            rest.pop(0)
            leading_space = LeadingSpace.ONE_STRIPPED
    elif rest and rest[0]["type"] == "Metaspace" and not replacements:
        step = rest.pop(0)
        replacements.append((step["replacement"], " "))
        if step.get("prepend_scheme", "always") != "never":
            leading_space = LeadingSpace.TOKEN_STRIPPED
    if rest or not steps:
        return None
    return _fallback_rule(replacements, leading_space, byte_fallback)


def _fallback_rule(replacements: list[tuple[str, str]], leading_space: LeadingSpace, byte_fallback: bool) -> _Rule:
    def is_fragment(name: str) -> bool:
        return byte_fallback and _BYTE_TOKEN.fullmatch(name) is not None

    def to_bytes(name: str) -> bytes:
        for old, new in replacements:
            name = name.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(name) if byte_fallback else None
        return bytes([int(match[1], 16)]) if match else name.encode()

    return _Rule(Joining.BYTE_FALLBACK, leading_space, to_bytes, is_fragment)


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's printable stand-ins: a visible Latin-1 byte is itself, the others follow from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(name: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in name])
    except KeyError:
        return name.encode()
