"""Rejects constraints by their text, before any compilation."""

from __future__ import annotations

import json
import re
from typing import Any

from baton.worker.core import Constraint, ConstraintForm

MAX_REPETITIONS = 50_000
MAX_PATTERN_PROPERTIES = 128

_COUNTED = 10**12  # repetitions; more are counted as that many
_MAX_NAME = 64  # characters of the name of a class of characters
_REPETITION = re.compile(r"\{(\d+)(,(\d*))?\}")
_LARK_SKIPPED = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*')
_LARK_REPETITION = re.compile(r"(?:[{~]\s*|,\s*|\.\.\s*)(\d{4,})")


def obvious_problem(constraint: Constraint) -> str | None:
    """Returns the problem of a constraint that can be rejected without a trial; else None."""
    form = constraint.form
    if form is ConstraintForm.REGEX:
        count = repetitions(constraint.text)
        return _too_many_repetitions(count) if count > MAX_REPETITIONS else None
    if form is ConstraintForm.GRAMMAR:
        text = _LARK_SKIPPED.sub("", constraint.text)
        count = max((int(found[1][:20]) for found in _LARK_REPETITION.finditer(text)), default=0)
        return _too_many_repetitions(count) if count > MAX_REPETITIONS else None
    if form is ConstraintForm.JSON_SCHEMA:
        return _schema_problem(constraint.text)
    return None


def repetitions(pattern: str) -> int:
    """Returns the repetitions that the regex requires: the product of the minimum counts of nested quantifiers."""
    stack = [0]  # of each open group: the most repetitions within
    last, result, index = 0, 0, 0  # last: repetitions of the item before the index
    while index < len(pattern):
        character = pattern[index]
        found = _REPETITION.match(pattern, index) if character == "{" else None
        if character == "\\":
            last, index = 1, _escape_end(pattern, index)
        elif character == "[":
            last, index = 1, _class_end(pattern, index)
        elif character == "(":
            stack.append(1)
            index += 1
        elif character == ")":
            last = stack.pop() if len(stack) > 1 else 1
            stack[-1] = max(stack[-1], last)
            index += 1
        elif found is not None:
            least = int(found[1][:20])
            last = min(max(last, 1) * max(least, 1), _COUNTED)
            stack[-1] = max(stack[-1], last)
            # A maximum that is too large for the library to count costs as much as a minimum.
            most = min(int(found[3][:20]), _COUNTED) if found[3] else 0
            result = max(result, last, most if most >= 10**6 else 0)
            index = found.end()
        else:
            last, index = 1, index + 1
    return result


def _escape_end(pattern: str, start: int) -> int:
    """Returns the index after an escape. Braces after some letters hold a code or a name: \\x{1F600}, \\p{Greek}."""
    index = start + 2
    if pattern[start + 1 : index] in ("x", "u", "U", "p", "P") and pattern[index : index + 1] == "{":
        return pattern.find("}", index, index + _MAX_NAME) + 1 or index
    return index


def _class_end(pattern: str, start: int) -> int:
    """Returns the index after a character class, which may contain others."""
    depth, index = 0, start
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            index += 1
        elif character == "[":
            depth += 1
        elif character == "]" and index > start + 1:
            depth -= 1
            if depth == 0:
                return index + 1
        index += 1
    return index


def _too_many_repetitions(count: int) -> str:
    return f"it repeats {count:,} times; at most {MAX_REPETITIONS:,} are allowed, nested repetitions multiplied"


def _schema_problem(text: str) -> str | None:
    if "patternProperties" not in text and "pattern" not in text:
        return None
    try:
        level: list[Any] = [json.loads(text)]
    except (ValueError, RecursionError):
        return None  # rejected by its parser
    while level:
        for value in level:
            if not isinstance(value, dict):
                continue
            patterns = value.get("patternProperties")
            if isinstance(patterns, dict) and len(patterns) > MAX_PATTERN_PROPERTIES:
                return f"patternProperties has {len(patterns)} patterns; at most {MAX_PATTERN_PROPERTIES} are allowed"
            pattern = value.get("pattern")
            if isinstance(pattern, str) and (count := repetitions(pattern)) > MAX_REPETITIONS:
                return f"pattern: {_too_many_repetitions(count)}"
        level = [item for value in level for item in _items(value)]
    return None


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
