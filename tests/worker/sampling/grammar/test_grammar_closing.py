"""Which objects of a schema take other properties: closed where the schema is silent, as given where it is not."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field
from support.sampling.grammar_rig import (
    EOS,
    SAMPLE_MODEL,
    VOCAB_SIZE,
    Run,
    json_schema,
    make_cpu_executor,
    make_engine,
    make_request,
    write_byte_tokenizer,
)
from tokenizers import Tokenizer

from baton.rpc.errors import InvalidRequest
from baton.worker.core import Constraint, ConstraintForm, ModelSpec
from baton.worker.sampling.grammar.compilation.cache import Compiler
from baton.worker.sampling.grammar.translation.closed_objects import close_objects
from baton.worker.sampling.grammar.vocabulary import load_vocabulary

INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
B = {"properties": {"b": INTEGER}, "required": ["b"]}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    folder = tmp_path_factory.mktemp("vocabulary")
    write_byte_tokenizer(folder)
    return Compiler(load_vocabulary(folder, ModelSpec(bytes(16), VOCAB_SIZE, 512, (EOS,))))


def accepts(compiler: Compiler, constraint: Constraint, text: str) -> bool:
    matcher = compiler.matcher(constraint)
    return bool(matcher.consume_tokens(compiler.vocabulary.tokenizer.tokenize_str(text)) and matcher.is_accepting())


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "no properties": ({"type": "object"}, ["{}", '{"c":1}'], []),
    "empty properties": ({"type": "object", "properties": {}}, ["{}"], ['{"c":1}']),
    "properties": (A, ['{"a":1}'], ['{"a":1,"c":1}']),
    "given true": ({**A, "additionalProperties": True}, ['{"a":1,"c":"x"}'], []),
    "given a schema": ({**A, "additionalProperties": INTEGER}, ['{"a":1,"c":1}'], ['{"a":1,"c":"x"}']),
    "given false": ({**A, "additionalProperties": False}, ['{"a":1}'], ['{"a":1,"c":1}']),
    "patterns": ({"type": "object", "patternProperties": {"^x": INTEGER}}, ['{"x1":1}'], ['{"c":1}']),
    "unevaluated false": ({**A, "unevaluatedProperties": False}, ['{"a":1}'], ['{"a":1,"c":1}']),
    "unevaluated true": ({**A, "unevaluatedProperties": True}, ['{"a":1,"c":1}'], []),
    "in an array": ({"type": "array", "items": A}, ['[{"a":1}]'], ['[{"a":1,"c":1}]']),
    "in a tuple": ({"type": "array", "prefixItems": [A], "items": False}, ['[{"a":1}]'], ['[{"a":1,"c":1}]']),
    "in a property": ({"properties": {"p": A}, "type": "object"}, ['{"p":{"a":1}}'], ['{"p":{"a":1,"c":1}}']),
    "in other properties": ({"type": "object", "additionalProperties": A}, ['{"p":{"a":1}}'], ['{"p":{"a":1,"c":1}}']),
    "in definitions": ({"$defs": {"A": A}, "$ref": "#/$defs/A"}, ['{"a":1}'], ['{"a":1,"c":1}']),
    "alternatives": ({"anyOf": [A, {"type": "null"}]}, ['{"a":1}', "null"], ['{"a":1,"c":1}']),
    "one part": ({"allOf": [A]}, ['{"a":1}'], ['{"a":1,"c":1}']),
    "several parts": ({"allOf": [A, B]}, ['{"a":1,"b":2}'], ['{"a":1}', '{"a":1,"b":2,"c":3}']),
    "a part by reference": (
        {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]}, ['{"a":1,"b":2}'], ['{"a":1,"b":2,"c":3}']),
    "beside a reference": (
        {"$defs": {"A": A}, "$ref": "#/$defs/A", **B}, ['{"b":2,"a":1}'], ['{"b":2}', '{"b":2,"a":1,"c":3}']),
    "a part twice": (
        {"$defs": {"A": A}, "type": "object",
         "properties": {"x": {"$ref": "#/$defs/A"}, "y": {"allOf": [{"$ref": "#/$defs/A"}, B]}}},
        ['{"x":{"a":1},"y":{"a":1,"b":2}}'], ['{"x":{"a":1,"b":2}}', '{"y":{"a":1,"b":2,"c":3}}']),
    "required alternatives": (
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER},
         "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a":1}', '{"b":1}'], ["{}", '{"a":1,"c":1}']),
    "a tree": (
        {"type": "object", "properties": {"v": INTEGER, "next": {"$ref": "#"}}},
        ['{"v":1,"next":{"v":2,"next":{}}}'], ['{"v":1,"next":{"w":2}}']),
    "an open part": (
        {"allOf": [A, B], "additionalProperties": True, "type": "object"}, ['{"a":1,"b":2,"c":"x"}'], ['{"a":1}']),
    "a value that looks like a schema": ({"const": {"properties": {"a": 1}}}, ['{"properties":{"a":1}}'], ["{}"]),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES.values(), ids=CASES)
def test_objects_take_what_their_schema_lists(
    compiler: Compiler, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    constraint = json_schema(schema, no_whitespace=True)
    assert [text for text in good if not accepts(compiler, constraint, text)] == []
    assert [text for text in bad if accepts(compiler, constraint, text)] == []


def test_schemas_in_structural_tags_are_closed(compiler: Compiler) -> None:
    tag = {"triggers": ["<f>"], "structures": [{"begin": "<f>", "schema": A, "end": "</f>"}]}
    constraint = Constraint(ConstraintForm.STRUCTURAL_TAG, json.dumps(tag), no_whitespace=True)
    assert accepts(compiler, constraint, '<f>{"a":1}</f>')
    assert not accepts(compiler, constraint, '<f>{"a":1,"c":1}</f>')


def test_a_schema_without_an_end_is_refused_in_plain_words(compiler: Compiler) -> None:
    for schema in ({"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "allOf": [{"$ref": "#/$defs/a"}, A]}):
        with pytest.raises(InvalidRequest) as caught:
            compiler.matcher(json_schema(schema))
        assert "leads back to itself" in caught.value.message, caught.value.message


LOOPS = {
    "a part": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "allOf": [
                    {"type": "object", "properties": {"a": {"type": "integer"}}},
                    {"properties": {"next": {"allOf": [{"$ref": "#/$defs/node"}, {"required": ["a"]}]}}},
                ],
            }
        },
    },
    "a part of a part": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "allOf": [{"properties": {"next": {"$ref": "#/$defs/again", "required": ["a"]}}}],
        "$defs": {"again": {"allOf": [{"$ref": "#/$defs/node"}, {"type": "object"}]}, "node": {
            "properties": {"a": {"type": "integer"}},
            "allOf": [{"properties": {"next": {"$ref": "#/$defs/again"}}}],
        }},
    },
}  # fmt: skip


@pytest.mark.parametrize("schema", LOOPS.values(), ids=LOOPS)
def test_a_composition_that_contains_itself_is_closed_at_every_depth(compiler: Compiler, schema: Any) -> None:
    text = json.dumps(close_objects(schema))
    assert len(text) < 5000
    constraint = json_schema(schema, no_whitespace=True)
    assert accepts(compiler, constraint, '{"a":1,"next":{"a":2,"next":{"a":3}}}')
    assert not accepts(compiler, constraint, '{"a":1,"next":{"a":2,"next":{"a":3,"b":4}}}')


def test_a_long_chain_of_compositions_is_refused_in_plain_words(compiler: Compiler) -> None:
    link = {"type": "object", "properties": {"a": {"type": "integer"}}}
    defs = {
        f"d{i}": {**link, "allOf": [{"properties": {"b": {"$ref": f"#/$defs/d{i + 1}", **link}}}]} for i in range(900)
    }
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        compiler.matcher(json_schema({"$ref": "#/$defs/d0", **link, "$defs": {**defs, "d900": link}}))


def test_expanded_references_are_bounded(compiler: Compiler) -> None:
    definitions: dict[str, Any] = {"d0": A}
    for level in range(1, 40):
        ref = {"$ref": f"#/$defs/d{level - 1}"}
        definitions[f"d{level}"] = {"allOf": [ref, ref], "properties": {f"p{level}": INTEGER}}
    with pytest.raises(InvalidRequest) as caught:
        compiler.matcher(json_schema({"$defs": definitions, "$ref": "#/$defs/d39"}))
    assert "expand to more than" in caught.value.message


_LEAVES = st.sampled_from([INTEGER, {"type": "string"}, {"enum": [1, "a"]}, True])
_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner).map(lambda value: {"type": "object", "properties": value}),
        inner.map(lambda value: {"type": "array", "items": value}),
        st.lists(inner, min_size=1, max_size=3).map(lambda value: {"anyOf": value}),
        inner.map(lambda value: {"type": "object", "additionalProperties": value}),
    ),
    max_leaves=8,
)


@given(_SCHEMAS)
@settings(max_examples=200)
def test_closing_twice_is_closing_once_and_changes_no_input(schema: Any) -> None:
    text = json.dumps(schema)
    closed = close_objects({"anyOf": [schema]})
    assert json.dumps(schema) == text
    assert close_objects(closed) == closed


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(9, description="left", ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: list[Literal["sit", "roll"]] = Field(default_factory=list, max_length=2)


class Person(BaseModel):
    """As instructor, outlines and smolagents send it: a plain model, without extra='forbid'."""

    name: str = Field(max_length=6)
    age: int = Field(ge=0, le=99)
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    friend: Cat | None = None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StrictCat(_Strict, Cat):
    pass


class StrictDog(_Strict, Dog):
    pass


class StrictPerson(_Strict):
    name: str
    age: int
    pet: Annotated[StrictCat | StrictDog, Field(discriminator="kind")]
    friend: StrictCat | None = None


def test_a_plain_pydantic_model_gives_objects_without_extras() -> None:
    executor = make_cpu_executor(SAMPLE_MODEL)
    engine, grammars = make_engine(executor, SAMPLE_MODEL)
    run = Run(engine)
    tokenizer = Tokenizer.from_file(str(SAMPLE_MODEL / "tokenizer.json"))
    constraint = json_schema(Person.model_json_schema(), no_whitespace=True)
    eos = frozenset(executor.model.eos_token_ids)
    requests = [make_request(constraint=constraint, seed=seed, max_tokens=200, eos=eos) for seed in range(4)]
    outputs = run.run(*requests)
    grammars.close()
    executor.close()
    assert run.failures == {}
    assert {run.reasons[request.request_id] for request in requests} == {"stop"}
    for tokens in outputs:
        StrictPerson.model_validate_json(tokenizer.decode(tokens))
