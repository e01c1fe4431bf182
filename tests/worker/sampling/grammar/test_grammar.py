"""Constraints without an engine: compilation, refusals, the cache, and advancing by output."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling.grammar_rig import (
    EOS,
    THINK_END,
    VOCAB_SIZE,
    choices,
    json_schema,
    make_request,
    regex,
    write_byte_tokenizer,
)
from tokenizers import Tokenizer

from baton.rpc.errors import InvalidRequest, Unsupported
from baton.v1 import types_pb2
from baton.worker.core import Constraint, ConstraintForm, ModelSpec, SamplingParams
from baton.worker.sampling.grammar.compilation.cache import Compiler
from baton.worker.sampling.grammar.grammars import Grammars
from baton.worker.sampling.grammar.limits import GrammarLimits
from baton.worker.sampling.grammar.matching.cpu_allowance import CpuAllowance
from baton.worker.sampling.grammar.matching.match import GrammarMatch
from baton.worker.sampling.grammar.messages import constraint_message, constraint_of
from baton.worker.sampling.grammar.translation.constraint import MAX_CHOICES, grammar_of
from baton.worker.sampling.grammar.translation.structural_tag import structural_tag_lark
from baton.worker.sampling.grammar.vocabulary import load_vocabulary, mask_of

MODEL = ModelSpec(bytes(16), VOCAB_SIZE, 512, (EOS,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vocabulary")
    write_byte_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture
def compiler(folder: Path) -> Compiler:
    return Compiler(load_vocabulary(folder, MODEL))


def opened(compiler: Compiler, constraint: Constraint, **request: object) -> GrammarMatch:
    made = make_request(constraint=constraint, **request)  # type: ignore[arg-type]
    match = GrammarMatch(made, None, CpuAllowance(1.0))
    match.open(compiler.vocabulary, compiler.matcher(match.constraint, match.namespace))
    match.fill()
    return match


def allowed(match: GrammarMatch) -> set[int]:
    bits = np.unpackbits(match.mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def take(match: GrammarMatch, *token_ids: int) -> None:
    for token_id in token_ids:
        assert match.consume([token_id])
        match.fill()


@given(st.sets(st.integers(0, 99)), st.integers(1, 100))
def test_a_mask_has_the_bits_of_its_tokens(token_ids: set[int], vocab_size: int) -> None:
    mask = mask_of(tuple(token_ids), vocab_size)
    assert mask.dtype == np.int32
    assert len(mask) == -(-vocab_size // 32)
    found = {token for token in range(len(mask) * 32) if int(mask[token // 32]) >> (token % 32) & 1}
    assert found == {token for token in token_ids if token < vocab_size}


def test_end_of_sequence_comes_only_where_the_answer_may_end(compiler: Compiler, tokenizer: Tokenizer) -> None:
    one, two = tokenizer.encode("1").ids[0], tokenizer.encode("2").ids[0]
    match = opened(compiler, regex("12*"))
    assert allowed(match) == {one}
    take(match, one)
    assert allowed(match) == {two, EOS}
    take(match, two, EOS)
    assert match.ended


def test_an_answer_that_nothing_may_follow_has_ended(compiler: Compiler, tokenizer: Tokenizer) -> None:
    match = opened(compiler, choices("yes"))
    take(match, *tokenizer.encode("yes").ids)
    assert match.ended
    assert match.error is None


def test_min_tokens_and_allowed_tokens_narrow_the_mask(compiler: Compiler, tokenizer: Tokenizer) -> None:
    digits = [tokenizer.encode(digit).ids[0] for digit in "0123456789"]
    sampling = SamplingParams(allowed_token_ids=(digits[3], digits[4], EOS), min_tokens=2, suppressed_token_ids=(EOS,))
    match = opened(compiler, regex("[0-9]+"), sampling=sampling)
    assert allowed(match) == {digits[3], digits[4]}
    take(match, digits[3])
    assert allowed(match) == {digits[3], digits[4]}
    take(match, digits[4])
    assert allowed(match) == {digits[3], digits[4], EOS}
    sampling = SamplingParams(allowed_token_ids=(digits[3],))
    nothing = opened(compiler, choices("7"), sampling=sampling)
    assert isinstance(nothing.error, InvalidRequest)


def test_reasoning_is_free_but_cannot_end_the_output(compiler: Compiler, tokenizer: Tokenizer) -> None:
    digit = tokenizer.encode("5").ids[0]
    match = opened(compiler, regex("5"), seed=1)
    assert allowed(match) == {digit}
    thinking = opened(compiler, regex("5", reasoning_end_token_ids=(100, THINK_END)))
    assert allowed(thinking) == set(range(VOCAB_SIZE)) - {EOS}
    take(thinking, THINK_END, 100, 100)
    assert digit in allowed(thinking)
    assert len(allowed(thinking)) == VOCAB_SIZE - 1
    take(thinking, THINK_END)
    assert allowed(thinking) == {digit}


def test_reasoning_may_begin_with_its_token_or_not_at_all(compiler: Compiler, tokenizer: Tokenizer) -> None:
    digit = tokenizer.encode("5").ids[0]
    constraint = regex("55", reasoning_end_token_ids=(THINK_END,), reasoning_start_token_id=1)
    plain = opened(compiler, constraint)
    assert allowed(plain) == {1, digit}
    take(plain, digit)
    assert allowed(plain) == {digit}
    thinking = opened(compiler, constraint)
    take(thinking, 1)
    assert len(allowed(thinking)) == VOCAB_SIZE - 1
    take(thinking, 50, THINK_END)
    assert allowed(thinking) == {digit}
    resumed = opened(compiler, constraint, output=[1, 50, THINK_END, digit])
    assert allowed(resumed) == {digit}


@given(cut=st.integers(0, 11))
@settings(deadline=None)
def test_an_output_taken_at_once_is_as_good_as_token_by_token(folder: Path, cut: int) -> None:
    compiler = Compiler(load_vocabulary(folder, MODEL))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode('{"a": true}').ids[:cut]
    constraint = json_schema({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    one = opened(compiler, constraint)
    take(one, *tokens)
    other = opened(compiler, constraint, output=tokens)
    assert one.ended == other.ended
    assert one.ended or allowed(one) == allowed(other)


def test_equal_constraints_are_compiled_once_while_they_are_kept(folder: Path) -> None:
    now = [0.0]
    limits = GrammarLimits(max_cached=2, max_cached_seconds=10)
    compiler = Compiler(load_vocabulary(folder, MODEL), limits, lambda: now[0])
    for pattern in ("a", "a", "b", "a"):
        compiler.matcher(regex(pattern))
    assert (compiler.num_compiled, len(compiler)) == (2, 2)
    compiler.matcher(regex("c"))  # "b" was used longest ago
    compiler.matcher(regex("a"))
    assert (compiler.num_compiled, len(compiler)) == (3, 2)
    now[0] = 11.0
    compiler.matcher(regex("a"))
    assert (compiler.num_compiled, len(compiler)) == (4, 1)


def test_the_cache_is_bounded_in_bytes(folder: Path) -> None:
    limits = GrammarLimits(max_cached_bytes=1000, max_grown_bytes=300)
    compiler = Compiler(load_vocabulary(folder, MODEL), limits)
    for number in range(20):
        compiler.matcher(regex(f"a{{{number}}}"), num_bytes=300)
    assert (len(compiler), compiler.num_bytes) == (3, 900)
    compiler.grow(regex("a{19}"), b"", 200)
    assert (len(compiler), compiler.num_bytes) == (2, 800)
    compiler.grow(regex("a{19}"), b"", 101)
    assert (len(compiler), compiler.num_bytes) == (1, 300)
    compiler.matcher(regex("b"), num_bytes=1001)
    assert (len(compiler), compiler.num_bytes) == (0, 0)


def test_a_compilation_that_failed_on_the_way_is_not_handed_out_again(compiler: Compiler) -> None:
    first = compiler.matcher(regex("ab"), b"me")
    compiler.drop(regex("ab"), b"me")
    compiler.drop(regex("ab"), b"me")
    assert first.is_error() is False
    assert compiler.cached(regex("ab"), b"me") is None
    assert compiler.num_bytes == 0


def test_matchers_of_one_compilation_share_no_place(compiler: Compiler, tokenizer: Tokenizer) -> None:
    constraint = choices("ab", "cd")
    first, second = opened(compiler, constraint), opened(compiler, constraint)
    take(first, tokenizer.encode("a").ids[0])
    assert allowed(second) == {tokenizer.encode(letter).ids[0] for letter in "ac"} | allowed(second)
    assert tokenizer.encode("c").ids[0] in allowed(second)
    assert tokenizer.encode("c").ids[0] not in allowed(first)


def test_limits_refuse_expensive_grammars(folder: Path) -> None:
    limits = GrammarLimits(max_grammar_size=50, max_lexer_fuel=2000)
    compiler = Compiler(load_vocabulary(folder, MODEL), limits)
    wide = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(200)}}
    for constraint in (json_schema(wide), regex("|".join(f"w{i}" for i in range(999)))):
        with pytest.raises(InvalidRequest) as caught:
            compiler.matcher(constraint)
        assert caught.value.field == f"constraint.{constraint.form.value}"
    with pytest.raises(InvalidRequest):
        grammar_of(choices(*("a" for _ in range(MAX_CHOICES + 1))))


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("given", [None, True, False])
def test_an_object_that_lists_properties_is_closed_by_default(
    compiler: Compiler, tokenizer: Tokenizer, asked: bool, given: bool | None
) -> None:
    inner: dict[str, object] = {"type": "object", "properties": {"b": {"type": "null"}}}
    if given is not None:
        inner["additionalProperties"] = given
    schema = {"properties": {"a": inner}, "type": "object"}
    match = opened(compiler, json_schema(schema, no_additional_properties=asked, no_whitespace=True))
    assert match.consume(tokenizer.encode('{"a":{"z').ids) is (given is True)


def test_keywords_that_cannot_be_enforced_are_ignored_on_request(compiler: Compiler) -> None:
    schema = {"type": "array", "uniqueItems": True}
    with pytest.raises(InvalidRequest):
        compiler.matcher(json_schema(schema))
    compiler.matcher(json_schema(schema, lenient=True))


TAGGED = {
    "triggers": ["<f="],
    "structures": [
        {"begin": "<f=one>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=two>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
}
FORMS = {
    "any_text": ({"type": "any_text"}, ["", "a\nb<"], []),
    "const": ({"type": "const_string", "value": "a/b"}, ["a/b"], ["a"]),
    "or": ({"type": "or", "elements": [{"type": "const_string", "value": "x"}, {"type": "regex", "pattern": "y+"}]},
           ["x", "yy"], ["xy"]),
    "free until": ({"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "END"}]},
                   ["END", "abc END"], ["abc", "END more"]),
    "tag of text": ({"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"},
                    ["<a>b</a>"], ["<a>b", "b</a>"]),
    "at least one": ({"type": "triggered_tags", "triggers": ["<"], "at_least_one": True,
                      "tags": [{"begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": "!"}]},
                     ["<a>1!", "text <a>1! more"], ["text", "<a>x!"]),
    "first only": ({"type": "triggered_tags", "triggers": ["<"], "stop_after_first": True,
                    "tags": [{"begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": "!"}]},
                   ["t <a>1!"], ["<a>1! more"]),
    "separated": ({"type": "tags_with_separator", "separator": ",",
                   "tags": [{"begin": "(", "content": {"type": "regex", "pattern": "[0-9]"}, "end": ")"}]},
                  ["(1)", "(1),(2)"], ["(1)(2)", "(1),"]),
}  # fmt: skip


@pytest.mark.parametrize(("form", "good", "bad"), FORMS.values(), ids=FORMS)
def test_structural_tags_allow_their_contents(
    compiler: Compiler, tokenizer: Tokenizer, form: dict[str, object], good: list[str], bad: list[str]
) -> None:
    constraint = Constraint(ConstraintForm.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": form}))

    def accepts(text: str) -> bool:
        matcher = compiler.matcher(constraint)
        return bool(matcher.consume_tokens(tokenizer.encode(text).ids)) and bool(matcher.is_accepting())

    assert [text for text in good if not accepts(text)] == []
    assert [text for text in bad if accepts(text)] == []


def test_the_older_form_of_structural_tags_is_known(compiler: Compiler, tokenizer: Tokenizer) -> None:
    constraint = Constraint(ConstraintForm.STRUCTURAL_TAG, json.dumps(TAGGED))
    for text, good in (("no call", True), ("so <f=one>12</f> and <f=two>true</f>.", True), ("<f=one>true", False)):
        assert bool(compiler.matcher(constraint).consume_tokens(tokenizer.encode(text).ids)) is good, text


@pytest.mark.parametrize(
    "tag",
    [
        {},
        {"type": "other", "format": {"type": "any_text"}},
        {"format": {"type": "sequence", "elements": []}},
        {"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "regex", "pattern": "a"}]}},
        {"format": {"type": "triggered_tags", "triggers": ["<x"], "tags": [{"begin": "<a", "content": {}}]}},
        {"format": {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": ""}},
        {"format": {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": 5}},
        {"format": {"type": "json_schema", "json_schema": 5}},
        {"structures": ["a"], "triggers": ["a"]},
        {"structures": [{"begin": "<a", "schema": {}, "end": ""}]},
        {"format": 5},
        {"format": {"type": "or", "elements": [{"type": "any_text"}] * 600}},
    ],
)
def test_a_malformed_structural_tag_is_refused(tag: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        structural_tag_lark(tag, lambda schema: schema)


_WITH_TEXT = set(ConstraintForm) - {ConstraintForm.CHOICES, ConstraintForm.JSON_OBJECT}
_TEXTS = st.text(max_size=20)


@given(
    st.builds(
        Constraint,
        form=st.sampled_from(sorted(_WITH_TEXT, key=lambda form: form.value)),
        text=_TEXTS,
        no_whitespace=st.booleans(),
        whitespace_pattern=_TEXTS,
        no_additional_properties=st.booleans(),
        lenient=st.booleans(),
        reasoning_end_token_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        reasoning_start_token_id=st.none() | st.integers(0, 9),
    )
    | st.lists(_TEXTS, max_size=3).map(lambda texts: choices(*texts))
    | st.just(Constraint(ConstraintForm.JSON_OBJECT))
)  # fmt: skip
def test_a_constraint_survives_the_wire(constraint: Constraint) -> None:
    message = types_pb2.Constraint.FromString(constraint_message(constraint).SerializeToString())
    assert constraint_of(message) == constraint


def test_a_message_without_form_is_refused() -> None:
    for message in (types_pb2.Constraint(), types_pb2.Constraint(regex="a", reasoning_end_token_ids=range(65))):
        with pytest.raises(InvalidRequest) as caught:
            constraint_of(message)
        assert caught.value.field.startswith("constraint")


def test_a_vocabulary_larger_than_the_models_is_cut(folder: Path) -> None:
    small = load_vocabulary(folder, ModelSpec(bytes(16), 200, 512, (EOS,)))
    match = opened(Compiler(small), Constraint(ConstraintForm.REGEX, "(.|\n)*"))
    assert len(match.mask) == 7
    assert max(allowed(match)) < 200


def test_a_broken_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unsupported):
        load_vocabulary(tmp_path, MODEL)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequest) as caught:
        load_vocabulary(tmp_path, MODEL)
    assert "tokenizer.json" in caught.value.message


def test_a_sleeping_engine_is_woken_when_a_compilation_ends(folder: Path) -> None:
    woken = threading.Event()
    grammars = Grammars(lambda: folder, MODEL, 1, wake=woken.set)
    match = grammars.open(make_request(constraint=regex("a")), "me")
    assert woken.wait(20)
    assert grammars.settle(0.0) == [match]
    assert match.ready
    assert not grammars.pending
    grammars.close()
    grammars.close()
