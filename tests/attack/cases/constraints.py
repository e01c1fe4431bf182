"""Constraints that are hard to compile: regexes, grammars, schemas, structural tags."""

from __future__ import annotations

import json
import random
from typing import Any

from attack.cases.case import RESPONSES, Draft, chat, large
from attack.cases.texts import filling
from support.sampling.constraint_search import random_constraint

from baton.worker.core import ConstraintForm


def searched(rng: random.Random) -> Draft:
    """Draws one of the random constraints that the worker's own search tries."""
    constraint = random_constraint(rng.randrange(10**6))
    fields = {
        ConstraintForm.REGEX: lambda: {"regex": constraint.text},
        ConstraintForm.GRAMMAR: lambda: {"grammar": constraint.text},
        ConstraintForm.CHOICES: lambda: {"choice": list(constraint.choices)},
        ConstraintForm.JSON_SCHEMA: lambda: {"json": json.loads(constraint.text)},
    }[constraint.form]()
    return chat(structured_outputs=fields, max_tokens=1)


def regexes(rng: random.Random) -> Draft:
    """Draws regexes with counts, alternations and classes that blow up."""
    count = rng.choice((10, 100, 1000, 30_000, 10**9))
    size = large(rng, 4_000_000)
    pattern = rng.choice(
        (
            f"(a{{{count}}}){{{count}}}",
            f"(a{{0,{count}}}){{0,{count}}}",
            f"((a|b)*a(a|b){{{count}}})",
            "|".join(f"word{index}" for index in range(size // 10)),
            "(" * (size // 2) + "a" + ")" * (size // 2),
            "(a?)" * (size // 4),
            r"(\p{L}|\p{N}|[^\x00-\x7f])" * min(count, size // 20),
            f"[\\w\\p{{Han}}]{{{count}}}",
            "(?=a)" * min(count, 1000) + "b",
            "a" * size,
            f"(.*a){{{count}}}",
            "[" + "a-z" * (size // 3) + "]",
        )
    )
    return chat(structured_outputs={"regex": pattern}, max_tokens=1, temperature=0)


def grammars(rng: random.Random) -> Draft:
    """Draws Lark and GBNF grammars."""
    count = rng.choice((10, 1000, 10**6, 10**9))
    size = large(rng, 4_000_000)
    many = size // 20
    text = rng.choice(
        (
            f'start: "a"{{{count}}}',
            f'root ::= "a"{{{count}}}',
            "start: r0\n"
            + "\n".join(f"r{index}: r{index + 1} r{index + 1}" for index in range(many))
            + f'\nr{many}: "a"',
            "start: start start | start",
            'start: "a" | start "b" | start start "c"',
            "root ::= " + " | ".join(f'"w{index}"' for index in range(many)),
            "start: " + "(" * (size // 2) + '"a"' + ")" * (size // 2),
            "root ::= root*",
            f"start: /(a{{{count}}}){{{count}}}/",
            "%import common.X\n" * many,
            filling(rng, size),
        )
    )
    return chat(structured_outputs={"grammar": text}, max_tokens=1)


def _schema(rng: random.Random) -> Any:
    count = rng.choice((10, 200, 2000, 40_000, 10**6))
    few = min(count, 100_000)
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(min(count, 150)):
        nested = {"type": "object", "properties": {"a": nested, "b": nested}}
        if len(json.dumps(nested)) > 1_000_000:
            break
    return rng.choice(
        (
            lambda: {"type": "object", "patternProperties": {f"^p{i}.*x{i}$": {"type": "string"} for i in range(few)}},
            lambda: {"enum": [f"value number {i}" for i in range(few)]},
            lambda: {"enum": ["a" * few * 10, "b"]},
            lambda: {"type": "string", "minLength": count, "maxLength": 2 * count},
            lambda: {"type": "array", "items": {"type": "array", "minItems": count}, "minItems": count},
            lambda: {"$ref": "#"},
            lambda: {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(few)}, "$ref": "#/$defs/d0"},
            lambda: {"allOf": [{"type": "object", "properties": {f"p{i}": {"type": "string"}}} for i in range(few)]},
            lambda: {"anyOf": [{"type": "object", "properties": {f"p{i}": {"$ref": "#"}}} for i in range(few)]},
            lambda: {"type": "integer", "minimum": 2**64, "maximum": 10**count if count <= 2000 else 10**4000},
            lambda: {"type": "number", "multipleOf": 1e-300},
            lambda: {"type": "string", "format": "uri" if count < 1000 else "x" * few},
            lambda: {"type": "string", "pattern": f"^(a{{1,{count}}}b?){{1,{count}}}$"},
            lambda: {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(few)}},
            lambda: {"type": "object", "properties": {f"p{i}": {} for i in range(few)}, "required": ["p0", "zz"]},
            lambda: nested,
            lambda: {"not": {"anyOf": [{"const": i} for i in range(few)]}},
        )
    )()


def schemas(rng: random.Random) -> Draft:
    """Draws JSON schemas, in every field that takes one."""
    schema = _schema(rng)
    form = rng.randrange(4)
    if form == 0:
        return chat(structured_outputs={"json": schema}, max_tokens=1)
    if form == 1:
        named = {"name": "s", "schema": schema, "strict": rng.random() < 0.5}
        return chat(response_format={"type": "json_schema", "json_schema": named}, max_tokens=1)
    if form == 2:
        text = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
        return Draft(RESPONSES, {"input": "x", "text": text, "stream": True, "max_output_tokens": 16})
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    return chat(tools=[tool], tool_choice="required", max_tokens=1)


def structural_tags(rng: random.Random) -> Draft:
    """Draws structural tags: many of them, or with heavy schemas."""
    count = rng.choice((1, 20, 500, 20_000))
    schema = _schema(rng) if count == 1 else {"type": "object"}
    structures = [{"begin": f"<f{index}>", "schema": schema, "end": f"</f{index}>"} for index in range(count)]
    tag = {"type": "structural_tag", "structures": structures, "triggers": ["<f"] * rng.choice((1, count))}
    if rng.random() < 0.5:
        return chat(response_format=tag, max_tokens=1)
    return chat(structured_outputs={"structural_tag": json.dumps(tag)}, max_tokens=1)
