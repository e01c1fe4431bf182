"""Translates constraints to the grammar library's language. Errors name the field. Compiles nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from baton.rpc.errors import InvalidRequest
from baton.worker.core import Constraint, ConstraintForm
from baton.worker.sampling.grammar.translation.closed_objects import close_objects
from baton.worker.sampling.grammar.translation.structural_tag import structural_tag_lark
from baton.worker.sampling.grammar.translation.text_pattern import literal, regex_literal

MAX_TEXT_BYTES = 256 * 1024
MAX_CHOICES = 4096
MAX_JSON_DEPTH = 64

# One blank, or one newline with indentation: with unlimited whitespace some models never end.
_WHITESPACE = r"(\x20|\x0D?\x0A[\x20\x09]{0,32})"


def field_of(constraint: Constraint) -> str:
    """Returns the request's field with the constraint's text."""
    return f"constraint.{constraint.form.value}"


def grammar_of(constraint: Constraint) -> str:
    """Returns the grammar's text. Raises InvalidRequest for a malformed or too large constraint."""
    size = len(constraint.text.encode()) + sum(len(choice.encode()) for choice in constraint.choices)
    if size > MAX_TEXT_BYTES:
        raise _refused(constraint, f"it has {size} bytes; at most {MAX_TEXT_BYTES} are taken")
    return _SOURCES[constraint.form](constraint)


def _json_object(constraint: Constraint) -> str:
    return _grammar_of_schema({"type": "object"}, constraint)


def _json_schema(constraint: Constraint) -> str:
    schema = _parsed(constraint)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _refused(constraint, f"a schema is an object or true, not {json.dumps(schema)[:40]}")
    return _grammar_of_schema(schema, constraint)


def _regex(constraint: Constraint) -> str:
    try:
        return str(LLMatcher.grammar_from_lark(f"start: {regex_literal(constraint.text)}"))
    except ValueError as error:
        raise _refused(constraint, str(error)) from error


def _choices(constraint: Constraint) -> str:
    choices = constraint.choices
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise _refused(constraint, f"there are {len(choices)}; it must be from 1 to {MAX_CHOICES}")
    if "" in choices:
        raise _refused(constraint, f"number {choices.index('')} is empty")
    texts = " | ".join(map(literal, choices))
    return str(LLMatcher.grammar_from_lark(f"start: {texts}"))


def _grammar(constraint: Constraint) -> str:
    if not constraint.text.strip():
        raise _refused(constraint, "it is empty")
    try:
        lark = any_to_lark(constraint.text)
    except Exception as error:  # the converter raises its parser's errors, of any type
        raise _refused(constraint, str(error)) from error
    return str(LLMatcher.grammar_from_lark(lark))


def _structural_tag(constraint: Constraint) -> str:
    tag = _parsed(constraint)
    if not isinstance(tag, dict):
        raise _refused(constraint, "it must be a JSON object")
    try:
        lark = structural_tag_lark(tag, lambda schema: _with_options(schema, constraint))
    except ValueError as error:
        raise _refused(constraint, str(error)) from error
    return str(LLMatcher.grammar_from_lark(lark))


_SOURCES: dict[ConstraintForm, Callable[[Constraint], str]] = {
    ConstraintForm.JSON_OBJECT: _json_object,
    ConstraintForm.JSON_SCHEMA: _json_schema,
    ConstraintForm.REGEX: _regex,
    ConstraintForm.CHOICES: _choices,
    ConstraintForm.GRAMMAR: _grammar,
    ConstraintForm.STRUCTURAL_TAG: _structural_tag,
}


def _grammar_of_schema(schema: dict[str, Any], constraint: Constraint) -> str:
    return str(LLMatcher.grammar_from_json_schema(json.dumps(_with_options(schema, constraint))))


def _with_options(schema: dict[str, Any], constraint: Constraint) -> dict[str, Any]:
    """Returns the closed schema, with the constraint's options for JSON."""
    options: dict[str, Any] = {"whitespace_flexible": not constraint.no_whitespace, "lenient": constraint.lenient}
    if not constraint.no_whitespace:
        options["whitespace_pattern"] = constraint.whitespace_pattern or _WHITESPACE
    return {**close_objects(schema), "x-guidance": options}


def _parsed(constraint: Constraint) -> Any:
    try:
        value = json.loads(constraint.text)
    except (ValueError, RecursionError) as error:
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else f"it is no JSON: {error}"
        raise _refused(constraint, problem) from error
    level, depth = [value], 0
    while level := [item for outer in level if isinstance(outer, dict | list) for item in _items(outer)]:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise _refused(constraint, f"it is nested more than {MAX_JSON_DEPTH} levels deep")
    return value


def _items(outer: dict[str, Any] | list[Any]) -> list[Any]:
    return list(outer.values()) if isinstance(outer, dict) else outer


def _refused(constraint: Constraint, problem: str) -> InvalidRequest:
    field = field_of(constraint)
    return InvalidRequest(f"{field}: {problem}", field=field)
