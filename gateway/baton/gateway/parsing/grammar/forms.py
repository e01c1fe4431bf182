"""Parts of structural tags, which workers compile into grammars. Special tokens in texts are replaced later."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Form = dict[str, Any]


def const(text: str) -> Form:
    """Returns the form of exactly this text."""
    return {"type": "const_string", "value": text}


def sequence(*elements: Form) -> Form:
    """Returns the form of the elements in order."""
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Iterable[Form]) -> Form:
    """Returns the form of one of the elements."""
    several = list(elements)
    return several[0] if len(several) == 1 else {"type": "or", "elements": several}


def json_of(schema: Mapping[str, Any]) -> Form:
    """Returns the form of JSON that is valid under the schema."""
    return {"type": "json_schema", "json_schema": dict(schema)}


def regex(pattern: str) -> Form:
    """Returns the form of text that matches the pattern."""
    return {"type": "regex", "pattern": pattern}


def spaced(text: str) -> Form:
    """Returns the form of this text after optional white space: one lexeme, which no longer text can absorb."""
    return regex(r"\s{0,4}" + re.escape(text).replace("\\ ", " "))


def text(
    excludes: Sequence[str] = (),
    matches: Sequence[str] = (),
    not_matches: Sequence[str] = (),
    special: Sequence[str] = (),
) -> Form:
    """Returns the form of text without `excludes` that may contain the special tokens.

    Patterns match the whole text.
    """
    form: Form = {"type": "any_text"}
    given = {"excludes": excludes, "matches": matches, "not_matches": not_matches, "special": special}
    return form | {key: list(value) for key, value in given.items() if value}


def repeat(content: Form, separator: str = "", optional: bool = False) -> Form:
    """Returns the form of the content, once or more (or not at all, if `optional`)."""
    form: Form = {"type": "repeat", "content": content, "optional": optional}
    return {**form, "separator": const(separator)} if separator else form


def member(content: Form, required: bool) -> Form:
    """Returns one of the parts of `members`."""
    return {"content": content, "required": required}


def members(several: Sequence[Form], separator: str = "") -> Form:
    """Returns the form of members in order; optional ones may be left out."""
    return {"type": "members", "members": list(several), "separator": separator}
