"""The grammar of arguments between tags: strings as plain text, other values as JSON. json_value parses them.

The top level is written member by member, so its schema must list the members. Schemas of values must allow either only
strings or no strings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from baton.gateway.parsing.grammar.forms import Form, const, either, json_of, member, members, sequence, text
from baton.gateway.parsing.grammar.schema_reader import (
    ANNOTATIONS,
    DEFINITIONS,
    Inexpressible,
    SchemaReader,
    check_keys,
    count_of,
)
from baton.gateway.parsing.reading.schema_kinds import ALL_KINDS
from baton.gateway.parsing.tool import Tool

_STRING_KEYS = ANNOTATIONS | {"type", "enum", "const", "pattern", "minLength", "maxLength", *DEFINITIONS}
_MAX_BRANCH_DEPTH = 16  # of alternatives within alternatives
# Plain text that the parser would read as JSON of another type, if strings are not the only type allowed.
_ANY = r"(.|\n)*"
_JSON_LIKE = r"\s*([\[{\-0-9](.|\n)*|true|false|null|True|False|None)\s*"


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
    several, schemas = [], SchemaReader(tool.parameters)
    for name, schema, required in schemas.properties(schemas.root):
        if name != name.strip() or any(char in name for char in "<>\n") or not name:
            raise Inexpressible(f"the name {name!r}")
        value = tagged_value(schema, schemas, stops, name)
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
    several, schemas = [], SchemaReader(tool.parameters)
    for name, schema, required in schemas.properties(schemas.root):
        if not is_key(name):
            raise Inexpressible(f"the name {name!r}")
        value = schema if isinstance(schema, Mapping) else {}
        content = sequence(const(begin(name)), json_of(schemas.with_definitions(value)))
        several.append(member(content, required))
    return members(several, separator) if several else None


def tagged_value(schema: object, schemas: SchemaReader, stops: Sequence[str], name: str) -> list[Form]:
    """Returns the alternative forms of one value. Raises Inexpressible."""
    if not isinstance(schema, Mapping):
        return [json_of({})]
    schema = schemas.resolved(schema)
    kinds = schemas.kinds(schema)
    if kinds == {"string"}:
        return _string_forms(schema, stops, name, mixed=False)
    if "string" not in kinds or kinds == ALL_KINDS:
        return [json_of(schemas.with_definitions(schema))]
    forms: list[Form] = []
    for branch in _branches(schema, schemas, name):
        if schemas.kinds(branch) == {"string"}:
            forms += _string_forms(branch, stops, name, mixed=True)
        else:
            forms.append(json_of(schemas.with_definitions(branch)))
    return forms


def _branches(schema: Mapping[str, Any], schemas: SchemaReader, name: str, depth: int = 0) -> list[Mapping[str, Any]]:
    """Returns the schema as alternatives, each of which allows only strings or no strings."""
    if depth > _MAX_BRANCH_DEPTH:
        raise Inexpressible(f"the alternatives of {name!r}: they are nested too deeply")
    if isinstance(schema.get("enum"), list):
        schemas.count(len(schema["enum"]))
        return [{"enum": [value]} for value in schema["enum"]]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            check_keys(schema, frozenset((key,)), name)
            parts = [schemas.resolved(part) for part in schema[key] if isinstance(part, Mapping)]
            kinds = [schemas.kinds(part) for part in parts]
            whole = [part for part, one in zip(parts, kinds, strict=True) if "string" not in one or one == {"string"}]
            mixed = [part for part, one in zip(parts, kinds, strict=True) if "string" in one and one != {"string"}]
            return whole + [one for part in mixed for one in _branches(part, schemas, name, depth + 1)]
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
        if not isinstance(values, list):
            raise Inexpressible(f"enum of {name!r}: it must be a list")
        return _literals([value for value in values if isinstance(value, str)], stops, name, mixed)
    matches = []
    least, most = count_of(schema, "minLength", name) or 0, count_of(schema, "maxLength", name)
    if least or most is not None:
        matches.append(f"(.|\\n){{{least},{'' if most is None else most}}}")
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
