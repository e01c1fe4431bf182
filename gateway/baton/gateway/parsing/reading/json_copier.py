"""Incremental JSON: finds the end of a value and decodes strings. Tolerates line breaks in strings."""

from __future__ import annotations

import re

import orjson

_PAIRS = {"}": "{", "]": "["}
_OUTSIDE = re.compile(r"[\s\w.,:+-]*", re.ASCII)
_SCALAR = re.compile(r"[\w.+-]*", re.ASCII)
_INSIDE = re.compile(r'[^"\\\x00-\x1f]*')
_CONTROL = re.compile(r"[\x00-\x1f]")
# The units of a string, with complete escapes: a high surrogate includes the low one that follows.
_UNITS = re.compile(
    r'(?:[^"\\\x00-\x1f]+|\\["\\/bfnrt]'
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|[\x00-\x1f])*"
)
# An incomplete escape.
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?\Z")


class JsonCopier:
    """Copies one value piece by piece. Checks brackets, and escapes control characters in strings."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self.is_scalar = False  # a scalar ends where something else begins
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False

    def copy(self, text: str, begin: int, end: int) -> tuple[str, int]:
        """Returns the copy of the value's part of text[begin:end], and where it ends."""
        pieces: list[str] = []
        at = begin
        while at < end and not self.done and not self.broken:
            at = self._inside(text, at, end, pieces) if self._in_string else self._outside(text, at, end, pieces)
        return "".join(pieces), at

    def _inside(self, text: str, at: int, end: int, pieces: list[str]) -> int:
        if self._escaped:
            self._escaped = False
            pieces.append(text[at])
            return at + 1
        stop = _end_of(_INSIDE, text, at, end)
        pieces.append(text[at:stop])
        if stop == end:
            return end
        char = text[stop]
        if char == '"':
            self._in_string = False
            self.done = not self._open
        elif char == "\\":
            self._escaped = True
        pieces.append(char if char in '"\\' else _escaped_control(char))
        return stop + 1

    def _outside(self, text: str, at: int, end: int, pieces: list[str]) -> int:
        if not self._open and (self.is_scalar or text[at] not in '"{['):
            return self._scalar(text, at, end, pieces)
        stop = _end_of(_OUTSIDE, text, at, end)
        pieces.append(text[at:stop])
        if stop == end:
            return end
        char = text[stop]
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._open.append(char)
        elif self._open and _PAIRS.get(char) == self._open[-1]:
            self._open.pop()
            self.done = not self._open
        else:
            self.broken = True
            return stop
        pieces.append(char)
        return stop + 1

    def _scalar(self, text: str, at: int, end: int, pieces: list[str]) -> int:
        stop = _end_of(_SCALAR, text, at, end)
        if stop == at and not self.is_scalar:
            self.broken = True
            return at
        self.is_scalar = True
        pieces.append(text[at:stop])
        self.done = stop < end
        return stop


class JsonStringDecoder:
    """Decodes a string piece by piece, starting after its opening quote."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False

    def decode(self, text: str, begin: int, end: int) -> tuple[str, int]:
        """Returns the decoded text of text[begin:end] and where it ends, after the closing quote if it is reached."""
        stop = _end_of(_UNITS, text, begin, end)
        raw = _CONTROL.sub(lambda match: _escaped_control(match[0]), text[begin:stop])
        decoded: str = orjson.loads(f'"{raw}"') if "\\" in raw else raw
        if stop < end:
            if text[stop] == '"':
                self.done = True
                return decoded, stop + 1
            self.broken = _BEGUN_ESCAPE.match(text, stop, end) is None
        return decoded, stop


def _end_of(pattern: re.Pattern[str], text: str, begin: int, end: int) -> int:
    match = pattern.match(text, begin, end)
    assert match is not None
    return match.end()


def _escaped_control(char: str) -> str:
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char, f"\\u{ord(char):04x}")
