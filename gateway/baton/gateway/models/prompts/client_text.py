"""Distinguishes control tokens in client text from those that a chat template writes.

Each control token has an anchor, one of its characters. While the template runs, a stand-in character replaces every
anchor in the client's text. The template may strip, join, split or replace text: a control token that is complete in
the prompt comes from the template.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from baton.gateway.models.tokenization.control_tokens import ControlTokens
from baton.rpc.errors import InvalidRequest

T = TypeVar("T")

# Rarest first, since templates compare the client's text with tags such as </think>.
_ANCHORS = "｜|[]<>"
# Printable, caseless and unchanged by str.strip: rarely used CJK ideographs.
_STAND_INS = (range(0x3400, 0x4DB6), range(0x20000, 0x2A6D7))
_TRIES = 64  # candidates tried in each range


@dataclass(frozen=True, slots=True)
class StandIns:
    """The stand-ins for one request's text."""

    stand_ins: Mapping[str, str] = field(default_factory=dict)  # by anchor
    words: Sequence[str] = ()  # control tokens without an anchor
    exempt: Sequence[str] = ()  # texts of the template that are compared with the client's text

    def __bool__(self) -> bool:
        return bool(self.stand_ins)

    def covered(self, value: T) -> T:
        """Returns a copy of a value with stand-ins in its texts, including keys of dictionaries."""
        return self._value(value) if self.stand_ins else value

    def uncovered(self, text: str) -> str:
        """Returns the text with the original characters."""
        for anchor, stand_in in self.stand_ins.items():
            text = text.replace(stand_in, anchor)
        return text

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {self._value(key): self._value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(item) for item in value]
        return value

    def _text(self, text: str) -> str:
        covered = self._replaced(text)
        if covered is not text:
            for literal in self.exempt:
                covered = covered.replace(self._replaced(literal), literal)
        return covered

    def _replaced(self, text: str) -> str:
        for word in self.words:
            if word in text:
                text = text.replace(word, self.stand_ins[word[0]] + word[1:])
        for anchor, stand_in in self.stand_ins.items():
            if anchor in text and anchor in _ANCHORS:
                text = text.replace(anchor, stand_in)
        return text


class ClientText:
    """Creates covers for the requests to one template. `literals` are the template's own texts."""

    def __init__(self, control: ControlTokens, literals: Collection[str]) -> None:
        self._anchors: dict[str, list[str]] = {}  # control tokens by anchor
        self._words: list[str] = []
        for text in control.ids:
            anchor = next((anchor for anchor in _ANCHORS if anchor in text), None)
            if anchor is None:
                self._words.append(text)
            else:
                self._anchors.setdefault(anchor, []).append(text)
        self._exempt = [literal for literal in literals if self._is_exempt(literal, control)]
        self._literals = "".join(literals)

    def cover(self, *values: Any) -> StandIns:
        """Returns the cover for these values; false if they contain no part of a control token.

        Raises InvalidRequest for values that are nested too deeply.
        """
        texts: list[str] = []
        try:
            add_texts(values, texts)
        except RecursionError:
            raise InvalidRequest("chat is nested too deeply", field="messages") from None
        anchors = [anchor for anchor in self._anchors if any(anchor in text for text in texts)]
        words = [word for word in self._words if any(word in text for text in texts)]
        stand_ins: dict[str, str] = {}
        for anchor in dict.fromkeys([*anchors, *(word[0] for word in words)]):
            stand_ins[anchor] = self._stand_in(texts, stand_ins.values())
        return StandIns(stand_ins, words, self._exempt)

    def _stand_in(self, texts: Iterable[str], taken: Collection[str]) -> str:
        foreign = [self._literals, *(text for text in texts if not text.isascii())]
        for codes in _STAND_INS:
            for code in random.sample(codes, _TRIES):
                char = chr(code)
                if char not in taken and not any(char in text for text in foreign):
                    return char
        raise InvalidRequest("the chat has too many different ideographs besides control tokens", field="messages")

    def _is_exempt(self, literal: str, control: ControlTokens) -> bool:
        """Returns whether client text may contain this literal unchanged, because it cannot be part of a control
        token.
        """
        anchors = [anchor for anchor in self._anchors if anchor in literal]
        if not anchors or control.spans(literal):
            return False
        return not any(_overlap(literal, text, anchor) for anchor in anchors for text in self._anchors[anchor])


def _overlap(literal: str, text: str, anchor: str) -> bool:
    """Returns whether the two can overlap in a text so that they share an anchor."""
    for shift in range(1 - len(literal), len(text)):
        begin, end = max(0, shift), min(len(text), shift + len(literal))
        common = text[begin:end]
        if anchor in common and common == literal[begin - shift : end - shift]:
            return True
    return False


def add_texts(value: Any, texts: list[str]) -> None:
    """Appends every text in a value to `texts`, including keys of dictionaries."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            add_texts(key, texts)
            add_texts(item, texts)
    elif isinstance(value, list | tuple):
        for item in value:
            add_texts(item, texts)
