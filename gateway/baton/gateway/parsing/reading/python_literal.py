"""Reads Python literals incrementally and writes them as JSON. Evaluates nothing."""

from __future__ import annotations

import json
import re

import orjson

from baton.gateway.parsing.reading.source import Malformed, Source, Steps, markers

_MAX_DEPTH = 32
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_WORD = re.compile(r"[\w.+-]+", re.ASCII)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_NUM_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def read_python_literal(source: Source, depth: int = 0) -> Steps[str]:
    """Returns the JSON text of the next literal. Raises Malformed for other text."""
    if depth > _MAX_DEPTH:
        raise Malformed
    yield from source.skip_space()
    char = yield from source.peek()
    if char in ("'", '"'):
        return json.dumps((yield from _read_string(source)), ensure_ascii=False)
    if char in ("[", "("):
        return (yield from _read_list(source, "]" if char == "[" else ")", depth))
    if char == "{":
        return (yield from _read_dict(source, depth))
    word = yield from source.read_pattern(_WORD)
    return _WORDS.get(word) or _number(word)


def _number(word: str) -> str:
    try:
        orjson.loads(word)
    except orjson.JSONDecodeError:
        raise Malformed from None
    return word


def _read_list(source: Source, close: str, depth: int) -> Steps[str]:
    yield from source.read_char()
    items: list[str] = []
    while True:
        yield from source.skip_space()
        if (yield from source.take(close)):
            break
        items.append((yield from read_python_literal(source, depth + 1)))
        yield from source.skip_space()
        if (yield from source.expect(",", close)) == close:
            break
    return f"[{', '.join(items)}]"


def _read_dict(source: Source, depth: int) -> Steps[str]:
    yield from source.read_char()
    items: list[str] = []
    while True:
        yield from source.skip_space()
        if (yield from source.take("}")):
            break
        key = yield from read_python_literal(source, depth + 1)
        yield from source.skip_space()
        yield from source.expect(":")
        value = yield from read_python_literal(source, depth + 1)
        name = key if key.startswith('"') else json.dumps(key)
        items.append(f"{name}: {value}")
        yield from source.skip_space()
        if (yield from source.expect(",", "}")) == "}":
            break
    return f"{{{', '.join(items)}}}"


def _read_string(source: Source) -> Steps[str]:
    quote = yield from source.read_char()
    stops = markers(quote, "\\")
    pieces: list[str] = []
    while True:
        text, stop = yield from source.read_until(stops)
        pieces.append(text)
        if stop == quote:
            return "".join(pieces)
        pieces.append((yield from _read_escape(source)))


def _read_escape(source: Source) -> Steps[str]:
    char = yield from source.read_char()
    if char not in _NUM_HEX_DIGITS:
        return _ESCAPES.get(char, f"\\{char}")
    digits = ""
    for _ in range(_NUM_HEX_DIGITS[char]):
        digits += yield from source.read_char()
    try:
        decoded = chr(int(digits, 16))
    except (ValueError, OverflowError):
        raise Malformed from None
    if decoded.encode(errors="ignore") == b"":
        raise Malformed  # a lone surrogate
    return decoded
