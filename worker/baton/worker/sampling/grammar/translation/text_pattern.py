"""Texts and regular expressions in the grammar library's syntax."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import regex_to_lark

ANY_TEXT = r"/(.|\n)*/"


def text_pattern(form: dict[str, Any], path: str) -> str:
    """Returns the expression for text that contains none of `excludes`, and that all of `matches` and none of
    `not_matches` match completely."""
    parts = [ANY_TEXT]
    parts += [regex_literal(pattern) for pattern in _texts(form, "matches", path)]
    parts += [f"~{regex_literal(pattern)}" for pattern in _texts(form, "not_matches", path)]
    excludes = _texts(form, "excludes", path)
    if excludes:
        parts.append(rf"~/(.|\n)*({'|'.join(_escaped(text) for text in excludes)})(.|\n)*/")
    return parts[0] if len(parts) == 1 else f"({' & '.join(parts)})"


def _texts(form: dict[str, Any], key: str, path: str) -> list[str]:
    value = form.get(key) or []
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"{path}.{key} must be a list of strings that are not empty")
    return value


def _escaped(text: str) -> str:
    return re.sub(r"[^\w]", lambda char: f"\\x{ord(char[0]):02x}" if char[0].isascii() else char[0], text)


def literal(text: str) -> str:
    """Returns the text as a Lark string. Empty for an empty text, because Lark has no empty string."""
    # Lark's strings are JSON's, except for a character that it treats as the end of a line.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def regex_literal(pattern: str) -> str:
    """Returns the regex in Lark's syntax, with `\\d` as 0 to 9. Raises ValueError if it is empty or incomplete."""
    if not pattern:
        raise ValueError("it is empty")
    # The whole text must match, so anchors at the ends are redundant; the library has none.
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and not _ends_in_escape(pattern[:-1]):
        pattern = pattern[:-1]
    if _ends_in_escape(pattern):
        raise ValueError("it ends with a backslash")
    return f"/{regex_to_lark(pattern, 'd')}/"


def _ends_in_escape(pattern: str) -> bool:
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1
