"""Constrained requests through real engines: the text always matches the constraint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sampling.grammar_rig import (
    EOS,
    SAMPLE_MODEL,
    THINK_END,
    Run,
    choices,
    json_schema,
    make_cpu_executor,
    make_engine,
    make_grammars,
    make_request,
    make_sim_executor,
    regex,
    write_byte_tokenizer,
    write_tiny_model,
)
from tokenizers import Tokenizer

from baton.rpc.errors import InvalidRequest, Unsupported
from baton.worker.core import Constraint, ConstraintForm, SamplingParams
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor
from baton.worker.executors.sim.executor import SimExecutor
from baton.worker.sampling.grammar.grammars import Grammars
from baton.worker.scheduling.settings import EngineSettings

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Subject:
    """A device, its tokenizer, and how engines are made on it."""

    def __init__(self, executor: Executor, folder: Path, eos: frozenset[int]) -> None:
        self.executor = executor
        self.folder = folder
        self.eos = eos
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def text(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode([token for token in token_ids if token not in self.eos])


@pytest.fixture(scope="module", params=["tiny", "sample", "sim", "sim-ahead"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    if request.param == "sample":
        executor = make_cpu_executor(SAMPLE_MODEL)
        return Subject(executor, SAMPLE_MODEL, frozenset(executor.model.eos_token_ids))
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "tiny":
        write_tiny_model(folder)
        return Subject(make_cpu_executor(folder), folder, frozenset({EOS}))
    write_byte_tokenizer(folder)
    return Subject(make_sim_executor(depth=2 if request.param == "sim-ahead" else 1), folder, frozenset({EOS}))


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def grammars(subject: Subject) -> Iterator[Grammars]:
    made = make_grammars(subject.executor, subject.folder)
    yield made
    made.close()


@pytest.fixture
def run(subject: Subject, grammars: Grammars) -> Iterator[Run]:
    engine, _ = make_engine(subject.executor, subject.folder, grammars=grammars)
    yield Run(engine)
    engine.audit()


_NAMES = st.text("abcxyz", min_size=1, max_size=4)
_INTEGERS = st.builds(
    lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
    st.integers(-99, 99),
    st.integers(0, 99),
)
_LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    _INTEGERS,
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
    st.builds(lambda values: {"enum": values}, st.lists(st.one_of(st.integers(-9, 9), _NAMES), min_size=1, max_size=3)),
)
_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties),
                "additionalProperties": False,
            },
            st.dictionaries(_NAMES, inner, min_size=1, max_size=3),
        ),
    ),
    max_leaves=4,
)
_HYPOTHESIS = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def check_json(value: object, schema: dict[str, object]) -> None:
    """Validates a value by the schemas of _SCHEMAS."""
    if "enum" in schema:
        assert value in schema["enum"]  # type: ignore[operator]
        return
    kind = schema["type"]
    if kind == "boolean":
        assert isinstance(value, bool)
    elif kind == "null":
        assert value is None
    elif kind == "integer":
        assert isinstance(value, int)
        assert schema["minimum"] <= value <= schema["maximum"]  # type: ignore[operator]
    elif kind == "string":
        assert isinstance(value, str)
        assert len(value) <= schema["maxLength"]  # type: ignore[operator]
    elif kind == "array":
        assert isinstance(value, list)
        assert len(value) <= schema["maxItems"]  # type: ignore[operator]
        for item in value:
            check_json(item, schema["items"])  # type: ignore[arg-type]
    else:
        assert isinstance(value, dict)
        assert set(value) == set(schema["required"])  # type: ignore[call-overload]
        for key, item in value.items():
            check_json(item, schema["properties"][key])  # type: ignore[index]


@_HYPOTHESIS
@given(schema=_SCHEMAS, seed=st.integers(0, 2**32))
def test_every_json_matches_its_schema(run: Run, subject: Subject, schema: dict[str, object], seed: int) -> None:
    requests = [
        make_request(constraint=json_schema(schema, no_whitespace=True), seed=seed, eos=subject.eos, max_tokens=300),
        make_request(constraint=json_schema(schema, no_whitespace=True), eos=subject.eos, max_tokens=300),
    ]
    for request, token_ids in zip(requests, run.run(*requests), strict=True):
        assert request.request_id not in run.failures
        assert run.reasons[request.request_id] == "stop"
        check_json(json.loads(subject.text(token_ids)), schema)


@_HYPOTHESIS
@given(
    pattern=st.sampled_from([r"[ab]{2,5}c", r"^\d{3}-\d{4}$", r"(yes|no|maybe){1,3}", r"é+ü{2}", r"x\$", r"a/b\\c"]),
    seed=st.integers(0, 2**32),
)
def test_every_text_matches_its_regex(run: Run, subject: Subject, pattern: str, seed: int) -> None:
    request = make_request(constraint=regex(pattern), seed=seed, eos=subject.eos, max_tokens=60)
    (token_ids,) = run.run(request)
    text = subject.text(token_ids)
    if run.reasons[request.request_id] == "stop":
        assert re.fullmatch(pattern, text), text


@_HYPOTHESIS
@given(texts=st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_every_choice_is_one_of_them(run: Run, subject: Subject, texts: list[str], seed: int) -> None:
    request = make_request(constraint=choices(*texts), seed=seed, eos=subject.eos)
    (token_ids,) = run.run(request)
    assert run.failures == {}
    assert run.reasons[request.request_id] == "stop"
    assert subject.text(token_ids) in texts


def test_a_grammar_may_be_lark_or_gbnf(run: Run, subject: Subject) -> None:
    texts = ['start: "yes" | "no" DIGIT\nDIGIT: /[0-9]/', 'root ::= "yes" | "no" d\nd ::= [0-9]']
    requests = [make_request(constraint=Constraint(ConstraintForm.GRAMMAR, text), eos=subject.eos) for text in texts]
    for token_ids in run.run(*requests):
        assert re.fullmatch("yes|no[0-9]", subject.text(token_ids))


def test_a_structural_tag_frees_the_text_around_its_tags(run: Run, subject: Subject) -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "<call>"},
                {"type": "json_schema", "json_schema": PERSON},
                {"type": "const_string", "value": "</call>"},
            ],
        },
    }
    constraint = Constraint(ConstraintForm.STRUCTURAL_TAG, json.dumps(tag), no_whitespace=True)
    request = make_request(constraint=constraint, eos=subject.eos, seed=5)
    (token_ids,) = run.run(request)
    match = re.fullmatch(r"<call>(.*)</call>", subject.text(token_ids), re.DOTALL)
    assert match is not None
    assert set(json.loads(match[1])) == {"name", "age"}


def test_the_same_seed_gives_the_same_text_and_others_give_others(run: Run, subject: Subject) -> None:
    constraint = json_schema(PERSON)
    requests = [make_request(constraint=constraint, seed=seed, eos=subject.eos) for seed in (1, 1, 2, 3)]
    texts = [subject.text(token_ids) for token_ids in run.run(*requests)]
    assert texts[0] == texts[1]
    assert len(set(texts)) >= 2


def test_unconstrained_requests_get_the_tokens_that_they_get_alone(subject: Subject) -> None:
    def make(count: int) -> list[object]:
        return [make_request([50 + i, 51, 52], max_tokens=24, seed=i, eos=frozenset()) for i in range(count)]

    engine, grammars = make_engine(subject.executor, subject.folder)
    alone = Run(engine).run(*make(12))  # type: ignore[arg-type]
    mixed = Run(engine)
    constrained = [make_request(constraint=json_schema(PERSON), seed=i, eos=subject.eos) for i in range(16)]
    plain = make(12)
    mixed.run(*constrained[:8], *plain, *constrained[8:])  # type: ignore[arg-type]
    assert [mixed.tokens[request.request_id] for request in plain] == alone  # type: ignore[attr-defined]
    assert mixed.failures == {}
    grammars.close()


def test_bad_constraints_fail_alone_and_name_their_field(run: Run, subject: Subject) -> None:
    bad = {
        "constraint.json_schema": [
            Constraint(ConstraintForm.JSON_SCHEMA, "{"),
            json_schema({"type": "spaceship"}),
            json_schema([]),
            json_schema({"not": {"type": "string"}}),
            Constraint(ConstraintForm.JSON_SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000),
            Constraint(ConstraintForm.JSON_SCHEMA, '{"items":' * 80 + "{}" + "}" * 80),
            json_schema({"$ref": "https://example.com/schema"}),
        ],
        "constraint.regex": [regex("("), regex("(?=x)"), regex(""), regex("a" * 300_000), regex("a\\")],
        "constraint.choices": [choices(), choices("a", "")],
        "constraint.grammar": [
            Constraint(ConstraintForm.GRAMMAR, "start: missing"),
            Constraint(ConstraintForm.GRAMMAR, "no grammar ("),
            Constraint(ConstraintForm.GRAMMAR, " "),
        ],
        "constraint.structural_tag": [
            Constraint(ConstraintForm.STRUCTURAL_TAG, "{}"),
            Constraint(ConstraintForm.STRUCTURAL_TAG, '{"format": {"type": "spell"}}'),
        ],
    }
    others = [make_request([60 + i], max_tokens=10, eos=frozenset()) for i in range(3)]
    requests = [(field, make_request(constraint=each)) for field, constraints in bad.items() for each in constraints]
    run.run(*others, *(request for _, request in requests))
    for field, request in requests:
        error = run.failures[request.request_id]
        assert isinstance(error, InvalidRequest), request.constraint
        assert error.field == field, request.constraint
        assert error.message.startswith(field)
        assert len(error.message) < 600
    assert all(len(run.tokens[other.request_id]) == 10 for other in others)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+b",
        r"(x+x+)+y",
        r"((a{1,99}){1,99}){1,99}",
        r"(.*a.{40}){10}",
        r"(a|b)*a(a|b){30}",
        "a{1000000}",
        r"((((a{1,99}){1,99}){1,99}){1,99}){1,99}",
    ],
)
def test_catastrophic_regexes_end(run: Run, subject: Subject, pattern: str) -> None:
    request = make_request(constraint=regex(pattern), seed=1, max_tokens=30, eos=subject.eos)
    other = make_request([70], max_tokens=30, eos=frozenset())
    run.run(request, other)
    assert len(run.tokens[other.request_id]) == 30
    assert request.request_id in run.reasons or isinstance(run.failures[request.request_id], InvalidRequest)


def test_a_grammar_starts_where_the_reasoning_ends(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    executor = make_sim_executor(eos_every=3)
    engine, grammars = make_engine(executor, tmp_path)
    run = Run(engine)
    output = [100, 101, THINK_END]
    constraint = regex("[0-9]{4}", reasoning_end_token_ids=(THINK_END,))
    thinking = make_request(constraint=constraint, max_tokens=40, seed=3)
    behind = make_request(constraint=constraint, max_tokens=40, seed=3, output=output)
    run.run(thinking, behind)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert re.fullmatch("[0-9]{4}", tokenizer.decode(run.tokens[behind.request_id]))
    tokens = run.tokens[thinking.request_id]
    # The simulated device never draws the end of the reasoning by itself but in free text, and end-of-sequence may not.
    assert EOS not in tokens[: tokens.index(THINK_END)] if THINK_END in tokens else EOS not in tokens
    assert run.reasons[thinking.request_id] == "length"
    grammars.close()


def test_a_reasoning_request_may_be_alone_in_its_step(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    engine, grammars = make_engine(make_sim_executor(), tmp_path)
    run = Run(engine)
    constraint = regex("[0-9]{4}", reasoning_end_token_ids=(THINK_END,))
    alone = make_request(constraint=constraint, max_tokens=40, seed=3)
    run.run(alone)
    assert not run.failures
    assert run.reasons[alone.request_id] in ("length", "stop")
    grammars.close()


def test_an_output_continues_in_its_grammar_on_another_worker(subject: Subject) -> None:
    engine, grammars = make_engine(subject.executor, subject.folder)
    whole = Run(engine)
    first = make_request(constraint=json_schema(PERSON), seed=9, eos=subject.eos)
    (expected,) = whole.run(first)
    assert len(expected) > 3
    resumed = [
        make_request(constraint=json_schema(PERSON), seed=9, eos=subject.eos, output=expected[:cut])
        for cut in range(1, len(expected), 5)
    ]
    again = Run(engine)
    rests = again.run(*resumed)  # type: ignore[arg-type]
    assert [expected[: 1 + 5 * at] + rest for at, rest in enumerate(rests)] == [expected] * len(rests)
    complete = make_request(
        constraint=json_schema(PERSON), seed=9, eos=frozenset(), output=[t for t in expected if t not in subject.eos]
    )
    assert again.run(complete) == [[]]
    assert again.reasons[complete.request_id] == "stop"
    wrong = make_request(constraint=json_schema(PERSON), output=[first.token_ids[0]] * 3)
    again.run(wrong)
    assert again.failures[wrong.request_id].field == "resume.output_token_ids"  # type: ignore[attr-defined]
    grammars.close()


def test_the_first_token_of_a_prefill_for_another_worker_is_constrained(run: Run, subject: Subject) -> None:
    constraint = choices("yes", "no")
    expected = make_request(constraint=constraint, eos=subject.eos)
    (tokens,) = run.run(expected)
    prefill = make_request(constraint=constraint, eos=subject.eos, prefill_only=True)
    run.run(prefill)
    assert run.first_tokens[prefill.request_id] == tokens[0]
    run.engine.free_prefill(prefill.request_id)


def test_preemption_loses_nothing(subject: Subject) -> None:
    requests = [make_request([90 + i], json_schema(PERSON), seed=i, eos=subject.eos, max_tokens=60) for i in range(6)]
    engine, grammars = make_engine(subject.executor, subject.folder)
    expected = Run(engine).run(*requests)
    grammars.close()
    if isinstance(subject.executor, SimExecutor):
        executor: Executor = make_sim_executor(num_blocks=9, max_model_len=64, depth=subject.executor.depth)
    else:
        executor = make_cpu_executor(subject.folder, num_blocks=9)
    engine, grammars = make_engine(executor, subject.folder)
    again = [make_request([90 + i], json_schema(PERSON), seed=i, eos=subject.eos, max_tokens=60) for i in range(6)]
    run = Run(engine)
    tokens = run.run(*again)
    assert engine.counters().num_preemptions > 0
    for one, other in zip(tokens, expected, strict=True):
        assert one == other[: len(one)]
    engine.audit()
    grammars.close()


def test_penalties_bias_logprobs_and_stop_tokens_hold_beside_a_grammar(run: Run, subject: Subject) -> None:
    digits = {digit: subject.tokenizer.encode(digit).ids[-1] for digit in "0123456789"}
    sampling = SamplingParams(
        temperature=1.0,
        seed=4,
        repetition_penalty=1.3,
        frequency_penalty=1.0,
        logit_bias=((digits["7"], 5.0), (40, 100.0)),
        allowed_token_ids=(digits["7"], digits["8"], digits["9"], 40),
        logprobs=2,
    )
    request = make_request(constraint=regex("[0-9]{8}"), sampling=sampling, eos=subject.eos)
    (tokens,) = run.run(request)
    assert re.fullmatch("[789]{8}", subject.text(tokens))
    assert len(run.logprobs[request.request_id]) == len(tokens)
    stopped = make_request(
        constraint=regex("8{1,9}"), sampling=SamplingParams(temperature=0.0), stop_token_ids=frozenset({digits["8"]})
    )
    run.run(stopped)
    assert run.tokens[stopped.request_id] == [digits["8"]]


def test_parameters_that_leave_no_token_fail_by_name(run: Run, subject: Subject) -> None:
    request = make_request(
        constraint=choices("yes"), sampling=SamplingParams(temperature=0.0, allowed_token_ids=(40,)), eos=subject.eos
    )
    run.run(request)
    error = run.failures[request.request_id]
    assert isinstance(error, InvalidRequest)
    assert "allowed_token_ids" in error.message


def test_a_complete_answer_ends_even_when_the_client_ignores_the_end(run: Run, subject: Subject) -> None:
    request = make_request(constraint=regex("[0-9]{2}x?"), eos=frozenset(), max_tokens=50, seed=8)
    (tokens,) = run.run(request)
    assert run.reasons[request.request_id] == "stop"
    assert len(tokens) <= 4


def test_an_abort_while_the_grammar_compiles_ends_at_once(subject: Subject) -> None:
    engine, grammars = make_engine(subject.executor, subject.folder)
    run = Run(engine)
    request = make_request(constraint=json_schema(PERSON))
    run.engine.submit(request)
    run.engine.abort(request.request_id)
    run.drain()
    assert run.reasons == {request.request_id: "abort"}
    assert run.tokens == {}
    engine.audit()
    grammars.close()


def test_an_engine_without_grammars_refuses(subject: Subject) -> None:
    engine = Engine(subject.executor, EngineSettings(max_num_requests=4, max_num_batched_tokens=64), epoch=1)
    with pytest.raises(Unsupported) as caught:
        engine.submit(make_request(constraint=regex("a")))
    assert caught.value.field == "constraint"


def test_a_model_without_a_tokenizer_refuses_constraints_alone(tmp_path: Path) -> None:
    engine, grammars = make_engine(make_sim_executor(), tmp_path)
    run = Run(engine)
    other, request = make_request([5], max_tokens=5, eos=frozenset()), make_request(constraint=regex("a"))
    run.run(other, request)
    assert len(run.tokens[other.request_id]) == 5
    assert isinstance(run.failures[request.request_id], Unsupported)
    grammars.close()


@settings(max_examples=40, deadline=None)
@given(
    depth=st.integers(1, 3),
    num_blocks=st.integers(14, 40),
    budget=st.sampled_from([8, 20, 64]),
    rows=st.integers(1, 8),
    plans=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from(["none", "json", "regex", "bad"]), st.integers(0, 30)),
        min_size=1,
        max_size=10,
    ),
    aborted=st.integers(-1, 9),
)
def test_random_traffic_ends_with_nothing_held(
    byte_folder: Path,
    depth: int,
    num_blocks: int,
    budget: int,
    rows: int,
    plans: list[tuple[int, str, int]],
    aborted: int,
) -> None:
    kinds = {"none": None, "json": json_schema(PERSON), "regex": regex("[ab]{5}c*"), "bad": regex("(")}
    executor = make_sim_executor(depth=depth, num_blocks=num_blocks, max_model_len=96)
    engine, grammars = make_engine(executor, byte_folder, rows=rows, budget=budget)
    run = Run(engine)
    requests = []
    for number, (length, kind, steps) in enumerate(plans):
        prompt = [10 + (number + i) % 90 for i in range(length)]
        requests.append((kind, make_request(prompt, kinds[kind], max_tokens=40, seed=number)))
        engine.submit(requests[-1][1])
        for _ in range(steps):
            run.step()
    if 0 <= aborted < len(requests):
        engine.abort(requests[aborted][1].request_id)
    run.drain()
    for kind, request in requests:
        name = request.request_id
        assert (name in run.reasons) != (name in run.failures)
        assert (name in run.failures) <= (kind == "bad")
    audit = engine.audit()
    assert (audit.num_held_blocks, audit.num_leased_blocks) == (0, 0)
    grammars.close()
