"""Constraints that are huge, hostile or absurd: served, or refused by name; never a defect, and others go on."""

import json
import threading

import pytest
from support.processes.stack import MODEL_NAME

TEXT = {"type": "string"}


def outputs(**structured):
    return {"structured_outputs": structured}


def schema(value):
    json_schema = {"name": "a", "strict": True, "schema": value}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def choice_of_two(index):
    return {"anyOf": [{"type": "object", "properties": {f"{side}{index}": TEXT}} for side in "ab"]}


def nested(depth):
    value = TEXT
    for _ in range(depth):
        value = {"anyOf": [value, {"type": "array", "items": value}]}
    return value


def patterns(tag):
    return {"type": "object", "patternProperties": {f"^{tag}_{i}.*x{i}$": TEXT for i in range(100)}}


# About 330 alternatives side by side are what a written grammar may have (GrammarLimits), whichever of
# them a model takes.
RULES = "\n".join(f'r{index}: "w{index}" start?' for index in range(300))
SERVED = {
    "nested quantifiers": outputs(regex="((a+)+)+b"),
    "nested bounds": outputs(regex="(x{1,1000}){1,1000}"),
    "an exponential automaton": outputs(regex="(a|b)*a(a|b){200}"),
    "many alternatives": outputs(regex="|".join(f"word{index}x{index * 7919 % 1000}" for index in range(4000))),
    "a wide object": schema({"type": "object", "properties": {f"k{index}": TEXT for index in range(2000)}}),
    "a tree": schema({"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}),
    "a billion items": schema({"type": "array", "items": TEXT, "minItems": 10**9}),
    "a billion characters": schema({"type": "string", "minLength": 5, "maxLength": 10**9}),
    "a pattern": schema({"type": "string", "pattern": "^(a+)+$"}),
    "many values": schema({"enum": [f"v{index}" for index in range(10_000)]}),
    "schemas in schemas": schema(nested(9)),
    "a left-recursive grammar": outputs(grammar='start: start "a" | "b"'),
    "an ambiguous grammar": outputs(grammar='start: start start | "a"'),
    "a large grammar": outputs(grammar="start: " + " | ".join(f"r{index}" for index in range(300)) + "\n" + RULES),
    "many choices": outputs(choice=[f"c{index}" for index in range(4096)]),
    "a long choice": outputs(choice=["x" * 10_000, "\U0001f600"]),
    "odd whitespace": outputs(json={"type": "object"}, whitespace_pattern="(a+)+b"),
}
REFUSED = {
    "a billion repetitions": outputs(regex="a{1000000000}"),
    "a billion in a grammar": outputs(grammar='start: "a"{1000000000}'),
    "nested exact counts": outputs(regex="(a{1000}){1000}"),
    "counts in a row": outputs(regex="(a{999}){40}(b{999}){40}"),
    "patterns that meet": schema({"patternProperties": {f"^p{i}.*x{i}$": TEXT for i in range(400)}}),
    "patterns in many objects": schema({"properties": {f"k{i}": patterns(i) for i in range(20)}}),
    "a large step": schema({"type": "integer", "multipleOf": 99_991}),
    "an integer of 70 bits": schema({"type": "integer", "maximum": 2**70}),
    "many brackets": outputs(regex="[" * 1000),
    "many parentheses": outputs(regex="(" * 20_000 + ")" * 20_000),
    "look-around": outputs(regex="(?=a)b"),
    "a reference back": outputs(regex=r"(a)\1"),
    "no character": outputs(regex=r"[^\s\S]"),
    "an empty regex": outputs(regex=""),
    "itself": schema({"$ref": "#"}),
    "a circle": schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "another host": schema({"$ref": "http://127.0.0.1:1/schema"}),
    "a file": schema({"$ref": "file:///etc/passwd"}),
    "nothing": schema({"$ref": "#/nothing"}),
    "a minimum above the maximum": schema({"type": "integer", "minimum": 5, "maximum": 4}),
    "no value": schema({"enum": []}),
    "too many products": schema({"allOf": [choice_of_two(index) for index in range(16)]}),
    "an unknown format": schema({"type": "string", "format": "spell"}),
    "a tiny step": schema({"type": "number", "multipleOf": 1e-300}),
    "false": outputs(json="false"),
    "too large": schema({"const": "x" * 300_000}),
    "too deep": schema(json.loads('{"items":' * 80 + "{}" + "}" * 80)),
    "a grammar that never begins": outputs(grammar="start: start"),
    "a grammar of another host": outputs(grammar='start: %json {"$ref": "http://127.0.0.1:1/"}'),
    "no grammar at all": outputs(grammar="\x00"),
    "an empty choice": outputs(choice=[""]),
    "no choices": outputs(choice=[]),
    "too many choices": outputs(choice=[f"c{index}" for index in range(4097)]),
    "a broken whitespace": outputs(json={"type": "object"}, whitespace_pattern="("),
    "too many triggers": outputs(structural_tag={"triggers": ["<"] * 1000, "structures": []}),
    "two forms": outputs(regex="a", choice=["a"]),
}


@pytest.fixture(scope="module", autouse=True)
def others(tandem_stack):
    """Runs an ordinary client meanwhile, and checks that its answers are those of an idle machine."""
    expected = tandem_stack.chat("Hi", temperature=0, max_tokens=8)["choices"]
    over, failures = threading.Event(), []

    def ask():
        while not over.wait(0.2):
            answer = tandem_stack.chat("Hi", temperature=0, max_tokens=8)["choices"]
            if answer != expected:
                failures.append(answer)

    client = threading.Thread(target=ask)
    client.start()
    yield
    over.set()
    client.join(60)
    assert not client.is_alive()
    assert failures == []
    tandem_stack.wait_all_blocks_back(10)
    for name, service in tandem_stack.services.items():
        assert "Traceback" not in service.log(), f"{name}:\n{service.log_tail(60)}"


def ask(stack, fields):
    body = {"model": MODEL_NAME, "prompt": "Once", "max_tokens": 12, "seed": 1, **fields}
    return stack.post("/v1/completions", body, timeout=60)


@pytest.mark.parametrize("fields", SERVED.values(), ids=SERVED)
def test_large_constraints_are_served(tandem_stack, fields):
    status, body = ask(tandem_stack, fields)
    assert status == 200, body
    assert body["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_unsupported_constraints_are_refused_by_name(tandem_stack, fields):
    status, body = ask(tandem_stack, fields)
    assert status == 400, body
    (field,) = fields
    assert body["error"]["param"].startswith(field), body
    message = body["error"]["message"]
    assert len(message) < 1000
    for word in ("NoExtension", "non-verbose", "coerce_one_of", "limits.", "lexer", "registry"):
        assert word not in message
