"""Combines a constraint with tools: the output is either tool calls or a text that follows the constraint."""

from __future__ import annotations

from typing import Any

import orjson

from baton.gateway.models.constraints.added_tokens import with_special_tokens
from baton.gateway.models.constraints.form_size import check_form_size
from baton.gateway.models.constraints.tools import is_strict
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.gateway.parsing.grammar.forms import Form
from baton.gateway.parsing.output_format import OutputFormat, ToolFormat
from baton.gateway.parsing.tool import ToolMode, ToolUse
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

_MAX_ALTERNATIVES = 512  # Maximum number of alternatives per level; more are grouped


def calls_or_text(
    requested: types_pb2.Constraint, field: str, use: ToolUse, formats: OutputFormat, tokenizer: Tokenizer
) -> types_pb2.Constraint:
    """Returns a constraint that also allows tool calls. `field` is the client's name of the constraint.

    Raises InvalidRequest if the gateway does not know how the model's calls begin.
    """
    tools = formats.tools
    if use.mode is not ToolMode.AUTO or not use.active or tools is None:
        return requested
    if tools.output_form is not None and is_strict(use):
        whole = tools.output_form(use.tools, _form_of(requested, field))
        check_form_size(whole, "tools")
        return _combined(requested, with_special_tokens(whole, tools.special_tokens, tokenizer.added_id), lenient=False)
    if tools.has_reasoning:
        # Calls precede the point where the constraint starts.
        combined = types_pb2.Constraint()
        combined.CopyFrom(requested)
        combined.may_end_in_reasoning = True
        return combined
    calls = _calls(use, tools, tokenizer)
    if not calls:
        raise InvalidRequest(
            f"{field} cannot be combined with tools for this model: its tool parser does not define how calls begin; "
            "leave out tools or {field}",
            field=field,
        )
    either: Form = {"type": "or", "elements": [_form_of(requested, field), *calls]}
    return _combined(requested, either, lenient=requested.lenient and not is_strict(use))


def _combined(requested: types_pb2.Constraint, form: Form, lenient: bool) -> types_pb2.Constraint:
    combined = types_pb2.Constraint()
    combined.CopyFrom(requested)
    combined.structural_tag = orjson.dumps({"type": "structural_tag", "format": form}).decode()
    combined.lenient = lenient
    return combined


def _calls(use: ToolUse, tools: ToolFormat, tokenizer: Tokenizer) -> list[Form]:
    if is_strict(use) and tools.syntax is not None:
        forms = tools.syntax.without_text(use.tools, use.parallel)
        for form in forms:
            check_form_size(form, "tools")
        return [with_special_tokens(form, tools.special_tokens, tokenizer.added_id) for form in forms]
    inside = [token_id for text in tools.special_tokens if (token_id := tokenizer.added_id(text)) is not None]
    rest: Form = {"type": "any_text", "token_ids": inside}
    starts = [_mark(text, tokenizer) for text in tools.starts]
    if tools.bare_start is not None:
        starts.append(tools.bare_start(use.tools))
    return [{"type": "sequence", "elements": [start, rest]} for start in starts]


def _mark(text: str, tokenizer: Tokenizer) -> Form:
    token_id = tokenizer.added_id(text)
    return {"type": "const_string", "value": text} if token_id is None else {"type": "token", "token_id": token_id}


def _form_of(requested: types_pb2.Constraint, field: str) -> Form:
    """Returns a constraint as a part of a structural tag."""
    match requested.WhichOneof("form"):
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            return {"type": "json_schema", "json_schema": _parsed(requested.json_schema, field)}
        case "regex":
            return {"type": "regex", "pattern": requested.regex}
        case "choices":
            return _any_of([{"type": "const_string", "value": text} for text in requested.choices.texts])
        case "grammar":
            return {"type": "grammar", "grammar": requested.grammar}
        case _:
            return _form_of_tag(_parsed(requested.structural_tag, field), field)


def _form_of_tag(tag: Any, field: str) -> Form:
    """Returns the form of a structural tag, given in either of its two notations."""
    if not isinstance(tag, dict):
        raise InvalidRequest(f"{field} must be a JSON object", field=field)
    if "structures" not in tag:
        form = tag.get("format")
        if not isinstance(form, dict):
            raise InvalidRequest(f"{field} must have `format`, or `structures` and `triggers`", field=field)
        return form
    structures = tag["structures"]
    if not isinstance(structures, list) or not all(isinstance(each, dict) for each in structures):
        raise InvalidRequest(f"{field}: structures must hold objects with begin, schema and end", field=field)
    tags = [
        {
            "begin": each.get("begin"),
            "content": {"type": "json_schema", "json_schema": each.get("schema")},
            "end": each.get("end"),
        }
        for each in structures
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def _any_of(forms: list[Form]) -> Form:
    while len(forms) > _MAX_ALTERNATIVES:
        groups = [forms[at : at + _MAX_ALTERNATIVES] for at in range(0, len(forms), _MAX_ALTERNATIVES)]
        forms = [{"type": "or", "elements": group} for group in groups]
    return {"type": "or", "elements": forms}


def _parsed(text: str, field: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{field} is not valid JSON: {error}", field=field) from None
