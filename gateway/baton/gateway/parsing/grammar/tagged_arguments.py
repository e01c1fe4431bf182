"""The grammar of arguments between tags: strings as plain text, other values as JSON. json_value parses them.

The top level is written member by member, so its schema must list the members. Schemas of values must allow either only
strings or no strings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from baton.gateway.parsing.grammar.forms import Form, const, either, json_of, member, members, sequence, text
from baton.gateway.parsing.reading.arguments import kinds_of, resolved
from baton.gateway.parsing.tool import Tool

_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly format $comment $schema $id".split()  # noqa: SIM905
)
_OBJECT_KEYS = _ANNOTATIONS | {"type", "properties", "required", "additionalProperties", *_DEFINITIONS, "strict"}
_STRING_KEYS = _ANNOTATIONS | {"type", "enum", "const", "pattern", "minLength", "maxLength", *_DEFINITIONS}
# Plain text that the parser would read as JSON of another type, if strings are not the only type allowed.
_ANY = r"(.|\n)*"
_JSON_LIKE = r"\s*([\[{\-0-9](.|\n)*|true|false|null|True|False|None)\s*"


class Inexpressible(Exception):
    """The schema cannot be expressed in tags. The message names the reason."""


def tagged_arguments(
    tool: Tool,
    begin: Callable[[str], str],
    end: str,
    stops: Sequence[str],
    last: str,
    of_kinds: tuple[Callable[[str], Form], Callable[[str], Form]] | None = None,
) -> Form | None:
    """Returns the form of all arguments, or None without arguments. Raises Inexpressible.

    `begin` precedes the value of a key and `end` follows it; values contain none of `stops`. `last` follows the end
    within each argument. `of_kinds` are the forms before strings and before other values, for tags that name the kind.
    """
    several = []
    for name, schema, required in properties_of(tool.parameters or {}, tool.parameters or {}):
        if name != name.strip() or any(char in name for char in "<>\n") or not name:
            raise Inexpressible(f"the name {name!r}")
        value = tagged_value(schema, tool.parameters or {}, stops, name)
        of_string, of_other = (lambda key: const(begin(key)),) * 2 if of_kinds is None else of_kinds
        content = either(
            sequence((of_other if one["type"] == "json_schema" else of_string)(name), one, const(end + last))
            for one in value
        )
        several.append(member(content, required))
    return members(several) if several else None


def listed_arguments(
    tool: Tool, begin: Callable[[str], str], separator: str, is_key: Callable[[str], bool]
) -> Form | None:
    """Returns the form of JSON arguments with keys, or None without arguments. Raises Inexpressible."""
    several = []
    for name, schema, required in properties_of(tool.parameters or {}, tool.parameters or {}):
        if not is_key(name):
            raise Inexpressible(f"the name {name!r}")
        value = schema if isinstance(schema, Mapping) else {}
        content = sequence(const(begin(name)), json_of(_with_definitions(value, tool.parameters or {})))
        several.append(member(content, required))
    return members(several, separator) if several else None


def properties_of(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Returns an object's properties: name, schema and whether it is required. Raises Inexpressible."""
    schema = resolved(schema, root)
    unknown = sorted(set(schema) - _OBJECT_KEYS)
    if unknown:
        raise Inexpressible(f"{unknown[0]} at the schema's top level")
    properties = schema.get("properties") or {}
    required = [name for name in schema.get("required") or () if isinstance(name, str)]
    names = [*properties, *(name for name in required if name not in properties)]
    return [(name, properties.get(name, {}), name in required) for name in names]


def tagged_value(schema: object, root: Mapping[str, Any], stops: Sequence[str], name: str) -> list[Form]:
    """Returns the alternative forms of one value. Raises Inexpressible."""
    if not isinstance(schema, Mapping):
        return [json_of({})]
    schema = resolved(schema, root)
    kinds = kinds_of(schema, root)
    if kinds == {"string"}:
        return _string_forms(schema, stops, name, mixed=False)
    if "string" not in kinds or kinds == kinds_of({}, {}):
        return [json_of(_with_definitions(schema, root))]
    forms: list[Form] = []
    for branch in _branches(schema, root, name):
        if kinds_of(branch, root) == {"string"}:
            forms += _string_forms(branch, stops, name, mixed=True)
        else:
            forms.append(json_of(_with_definitions(branch, root)))
    return forms


def _branches(schema: Mapping[str, Any], root: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Returns the schema as alternatives, each of which allows only strings or no strings."""
    if isinstance(schema.get("enum"), list):
        return [{"enum": [value]} for value in schema["enum"]]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            check_keys(schema, frozenset((key,)), name)
            parts = [resolved(part, root) for part in schema[key] if isinstance(part, Mapping)]
            mixed = [part for part in parts if "string" in kinds_of(part, root) and kinds_of(part, root) != {"string"}]
            whole = [part for part in parts if part not in mixed]
            return whole + [one for part in mixed for one in _branches(part, root, name)]
    if isinstance(schema.get("type"), list):
        others = [kind for kind in schema["type"] if kind != "string"]
        of_strings = {key: value for key, value in schema.items() if key in _STRING_KEYS}
        not_strings = {key: value for key, value in schema.items() if key not in ("pattern", "minLength", "maxLength")}
        return [{**of_strings, "type": "string"}, {**not_strings, "type": others}]
    raise Inexpressible(f"the type of {name!r}: it mixes strings and other values, which tags cannot distinguish")


def _string_forms(schema: Mapping[str, Any], stops: Sequence[str], name: str, mixed: bool) -> list[Form]:
    check_keys(schema, _STRING_KEYS, name)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        return _literals([value for value in values if isinstance(value, str)], stops, name, mixed)
    matches = []
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        matches.append(f"(.|\\n){{{least},{most}}}")
    if "pattern" in schema:
        matches.append(_searching(str(schema["pattern"]), name))
    return [text(stops, matches, [_JSON_LIKE] if mixed else ())]


def _literals(values: Sequence[str], stops: Sequence[str], name: str, mixed: bool) -> list[Form]:
    texts = [value for value in values if not any(stop in value for stop in stops) and not (mixed and _is_json(value))]
    if not texts:
        raise Inexpressible(f"the values of {name!r}: none of them can be written between tags")
    # An empty text cannot be a literal.
    return [const(value) if value else text(matches=["(.|\\n){0}"]) for value in texts]


def _is_json(value: str) -> bool:
    stripped = value.strip()
    if stripped in ("True", "False", "None"):
        return True
    try:
        orjson.loads(stripped)
    except orjson.JSONDecodeError:
        return False
    return True


def _searching(pattern: str, name: str) -> str:
    """Returns a regex of whole texts that contain the pattern, as in JSON Schema."""
    body = pattern.removeprefix("^")
    at_start = len(body) < len(pattern)
    at_end = body.endswith("$") and (len(body[:-1]) - len(body[:-1].rstrip("\\"))) % 2 == 0
    body = body[:-1] if at_end else body
    if (at_start or at_end) and _has_alternatives(body):
        raise Inexpressible(f"the pattern of {name!r}: it combines alternatives with an anchor")
    return f"{'' if at_start else _ANY}({body}){'' if at_end else _ANY}"


def _has_alternatives(body: str) -> bool:
    """Returns whether the regex has alternatives outside of all groups."""
    depth, in_class, escaped = 0, False, False
    for char in body:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and not depth:
            return True
    return False


def _with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    return {**{key: root[key] for key in _DEFINITIONS if key in root}, **schema}


def check_keys(schema: Mapping[str, Any], allowed: frozenset[str], name: str) -> None:
    """Raises Inexpressible if the schema of `name` has keys beside annotations, definitions and these."""
    unknown = sorted(set(schema) - allowed - _ANNOTATIONS - set(_DEFINITIONS))
    if unknown:
        raise Inexpressible(f"{unknown[0]} of {name!r}")
