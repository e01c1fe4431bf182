"""Parts of structural tags, which workers turn into grammars. Texts may spell special tokens: `marks.py` finds them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Form = dict[str, Any]


def const(text: str) -> Form:
    """Returns the form of exactly this text."""
    return {"type": "const_string", "value": text}


def sequence(*elements: Form) -> Form:
    """One after the other."""
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Iterable[Form]) -> Form:
    """Returns the form of one of the elements."""
    several = list(elements)
    return several[0] if len(several) == 1 else {"type": "or", "elements": several}


def json_of(schema: Mapping[str, Any]) -> Form:
    """JSON that is valid under the schema."""
    return {"type": "json_schema", "json_schema": dict(schema)}


def regex(pattern: str) -> Form:
    """Returns the form of text that matches the pattern."""
    return {"type": "regex", "pattern": pattern}


def spaced(text: str) -> Form:
    """This text, maybe behind white space: one lexeme, which a longer text cannot swallow."""
    return regex(r"\s{0,4}" + re.escape(text).replace("\\ ", " "))


def text(
    excludes: Sequence[str] = (),
    matches: Sequence[str] = (),
    not_matches: Sequence[str] = (),
    special: Sequence[str] = (),
) -> Form:
    """Any text without `excludes`, which may have these special tokens in it; patterns match it as a whole."""
    form: Form = {"type": "any_text"}
    given = {"excludes": excludes, "matches": matches, "not_matches": not_matches, "special": special}
    return form | {key: list(value) for key, value in given.items() if value}


def repeat(content: Form, separator: str = "", optional: bool = False) -> Form:
    """The content once or more; `optional`: or not at all."""
    form: Form = {"type": "repeat", "content": content, "optional": optional}
    return {**form, "separator": const(separator)} if separator else form


def member(content: Form, required: bool) -> Form:
    """Returns one of the members that `members` takes."""
    return {"content": content, "required": required}


def members(several: Sequence[Form], separator: str = "") -> Form:
    """Members in their order, some left out."""
    return {"type": "members", "members": list(several), "separator": separator}
