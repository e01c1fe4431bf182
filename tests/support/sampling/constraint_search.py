"""Random expensive constraints by a seed: regexes, grammars and JSON schemas."""

from __future__ import annotations

import json
import random
from typing import Any

from baton.worker.core import Constraint, ConstraintForm

_MAX_TEXT = 250_000
_COUNTS = (0, 1, 2, 3, 7, 20, 64, 100, 300, 999, 5000, 40_000, 10**6, 10**9)
_CLASSES = (
    "a",
    "b",
    ".",
    "[a-z]",
    "[^b]",
    r"\d",
    r"\w",
    r"\s",
    r"\p{L}",
    r"[\p{L}\p{N}]",
    "é",
    "\U0001f600",
    "(?i:ab)",
)
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "json-pointer")


def random_constraint(seed: int) -> Constraint:
    """Returns the constraint of this seed."""
    rng = random.Random(seed)
    maker = rng.choice((_regex, _grammar, _schema, _schema, _schema, _choices))
    return maker(rng)


def _regex(rng: random.Random) -> Constraint:
    return Constraint(ConstraintForm.REGEX, _pattern(rng, rng.randint(1, 4)) or "a")


def _pattern(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(_CLASSES)
    parts = [_pattern(rng, depth - 1) for _ in range(rng.choice((1, 1, 2, 3, 8)))]
    body = rng.choice(("", "|")).join(parts)
    least = rng.choice(_COUNTS)
    quantifier = rng.choice(
        ("", "*", "+", "?", f"{{{least}}}", f"{{{least},}}", f"{{0,{least}}}", f"{{{least},{2 * least}}}")
    )
    return f"({body}){quantifier}"


def _grammar(rng: random.Random) -> Constraint:
    names = [f"r{index}" for index in range(rng.choice((1, 3, 20, 200)))]
    terms = ['"a"', '"b"', "/[a-z]+/", "/.*/", f"/{_pattern(rng, 1)}/".replace("\U0001f600", "x")]
    lines = [f"start: {' '.join(rng.choices(names, k=rng.randint(1, 3)))}"]
    for name in names:
        options = [
            " ".join(
                rng.choice(("", "", "?", "*", "+", f"{{{rng.choice(_COUNTS)}}}")).join((part, ""))
                for part in rng.choices([*names, *terms, *terms], k=rng.randint(1, 4))
            )
            for _ in range(rng.randint(1, 4))
        ]
        lines.append(f"{name}: {' | '.join([*options, rng.choice(terms)])}")
    return Constraint(ConstraintForm.GRAMMAR, "\n".join(lines))


def _choices(rng: random.Random) -> Constraint:
    length, count = rng.choice(((5, 4096), (60, 4000), (1000, 250), (10_000, 20)))
    texts = ("".join(rng.choices('ab \n"é', k=rng.randint(1, length))) for _ in range(count))
    return Constraint(ConstraintForm.CHOICES, choices=tuple(dict.fromkeys(texts)))


def _schema(rng: random.Random) -> Constraint:
    while True:
        root = _node(rng, rng.randint(1, 4))
        names = [f"d{index}" for index in range(rng.choice((0, 0, 1, 5, 30)))]
        if names:
            root["$defs"] = {name: _node(rng, 2, names) for name in names}
        text = json.dumps(root)
        if len(text) <= _MAX_TEXT:
            return Constraint(ConstraintForm.JSON_SCHEMA, text, lenient=rng.random() < 0.5)


def _node(rng: random.Random, depth: int, names: list[str] | None = None) -> dict[str, Any]:
    if names and rng.random() < 0.3:
        ref: dict[str, Any] = {"$ref": f"#/$defs/{rng.choice(names)}"}
        return ref if depth == 0 or rng.random() < 0.7 else {**ref, **_object(rng, depth, names)}
    if depth == 0:
        return _leaf(rng)
    kind = rng.choice(("object", "object", "array", "of", "patterns"))
    if kind == "array":
        node: dict[str, Any] = {"type": "array", "items": _node(rng, depth - 1, names)}
        node |= {key: rng.choice(_COUNTS) for key in ("minItems", "maxItems") if rng.random() < 0.4}
        return node
    if kind == "of":
        count = rng.choice((2, 3, 10, 60))
        return {rng.choice(("anyOf", "oneOf", "allOf")): [_node(rng, depth - 1, names) for _ in range(count)]}
    if kind == "patterns":
        count = rng.choice((1, 5, 40, 120, 400))
        tail = rng.choice(("", ".*x", "[a-z]*$", "(ab){9}"))
        return {"type": "object", "patternProperties": {f"^p{index}{tail}": _leaf(rng) for index in range(count)}}
    return _object(rng, depth, names)


def _object(rng: random.Random, depth: int, names: list[str] | None) -> dict[str, Any]:
    count = rng.choice((1, 3, 10, 50, 400, 2000)) if depth == 1 else rng.choice((1, 3, 8))
    keys = [f"k{index}" + "x" * rng.choice((0, 0, 30)) for index in range(count)]
    node: dict[str, Any] = {"type": "object", "properties": {key: _node(rng, depth - 1, names) for key in keys}}
    if rng.random() < 0.5:
        node["required"] = rng.sample(keys, rng.randint(0, count))
    if rng.random() < 0.3:
        node["additionalProperties"] = _leaf(rng)
    if rng.random() < 0.1:
        node |= {"minProperties": rng.choice(_COUNTS), "maxProperties": rng.choice(_COUNTS)}
    return node


def _leaf(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(7)
    if kind == 0:
        return {"enum": [f"v{index * 7919}" for index in range(rng.choice((1, 20, 500)))]}
    if kind == 1:
        low = rng.choice((-(2**63), -5, 0, 3))
        return {"type": rng.choice(("integer", "number")), "minimum": low, "maximum": rng.choice((9, 10**18, 2**64))}
    if kind == 2:
        return {"type": "integer", "multipleOf": rng.choice((1, 2, 97, 997, 9973, 99_991, 0.01, 1e-9))}
    if kind == 3:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    if kind == 4:
        return {"type": "string", "pattern": _pattern(rng, rng.randint(1, 2))}
    if kind == 5:
        return {"type": "string", "minLength": rng.choice(_COUNTS), "maxLength": rng.choice(_COUNTS)}
    return {"const": "x" * rng.choice((1, 100, 1000))}
