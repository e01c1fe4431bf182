"""Constraints whose text spells an added token, such as <tool_call>, or the end of the sequence."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from support.sampling.grammar_rig import SAMPLE_MODEL, Run, choices, make_cpu_executor, make_engine, make_request, regex
from tokenizers import Tokenizer

from baton.worker.core import Constraint, ConstraintForm
from baton.worker.executors.cpu.executor import CpuExecutor

TOKENIZER = Tokenizer.from_file(str(SAMPLE_MODEL / "tokenizer.json"))
CALL, END_CALL = (TOKENIZER.token_to_id(text) for text in ("<tool_call>", "</tool_call>"))
CALLED = r"<tool_call>\d\d</tool_call>"


@pytest.fixture(scope="module")
def executor() -> CpuExecutor:
    return make_cpu_executor(SAMPLE_MODEL)


@pytest.fixture
def run(executor: CpuExecutor) -> Iterator[Run]:
    engine, grammars = make_engine(executor, SAMPLE_MODEL)
    yield Run(engine)
    engine.audit()
    grammars.close()


def text_of(token_ids: list[int], eos: frozenset[int] = frozenset()) -> str:
    shown = [token_id for token_id in token_ids if token_id not in eos]
    return str(TOKENIZER.decode(shown, skip_special_tokens=False))


def grammar(text: str) -> Constraint:
    return Constraint(ConstraintForm.GRAMMAR, text)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (regex(CALLED), CALLED),
        (regex(r"a?<think>\d</think>b"), r"a?<think>\d</think>b"),
        (choices("<tools>", "<tool_call>"), "<tools>|<tool_call>"),
        (choices("<|im_end|>"), r"<\|im_end\|>"),
        (regex(r"<\|eos\|>\d<\|bos\|>"), r"<\|eos\|>\d<\|bos\|>"),
        (grammar('start: "<tool" "_call>" /[0-9]/'), r"<tool_call>\d"),
        (grammar("start: <tool_call> /[0-9]/ </tool_call>"), r"<tool_call>\d</tool_call>"),
    ],
)
def test_a_text_may_spell_added_tokens(run: Run, executor: CpuExecutor, constraint: Constraint, pattern: str) -> None:
    eos = frozenset(executor.model.eos_token_ids)
    requests = [make_request(constraint=constraint, seed=seed, eos=eos) for seed in range(1, 5)]
    outputs = run.run(*requests)
    assert not run.failures
    for output in outputs:
        text = text_of(output, eos)
        assert re.fullmatch(pattern, text), text


def test_the_model_may_write_them_with_their_own_tokens(run: Run, executor: CpuExecutor) -> None:
    only = make_request(constraint=regex(CALLED), eos=frozenset(executor.model.eos_token_ids))
    only.sampling = only.sampling.__class__(logit_bias=((CALL, 100.0), (END_CALL, 100.0)))
    (output,) = run.run(only)
    assert [output[0], output[3]] == [CALL, END_CALL]
    assert re.fullmatch(CALLED, text_of(output, only.stop.eos_token_ids))


def test_special_tokens_are_no_text(run: Run, executor: CpuExecutor) -> None:
    eos = frozenset(executor.model.eos_token_ids)
    (output,) = run.run(make_request(constraint=regex(r"<\|im_start\|>x"), eos=eos))
    assert TOKENIZER.token_to_id("<|im_start|>") not in output


def test_an_output_with_rules_continues_elsewhere(run: Run, executor: CpuExecutor) -> None:
    eos = frozenset(executor.model.eos_token_ids)
    digit = TOKENIZER.token_to_id("7")
    given = [[CALL, digit], [CALL, digit, digit, END_CALL], TOKENIZER.encode("<tool", add_special_tokens=False).ids]
    rests = run.run(*(make_request(constraint=regex(CALLED), eos=eos, output=output) for output in given))
    assert not run.failures
    for output, rest in zip(given, rests, strict=True):
        assert re.fullmatch(CALLED, text_of([*output, *rest], eos))
    wrong = make_request(constraint=regex(CALLED), eos=eos, output=[CALL, CALL])
    run.run(wrong)
    assert run.failures[wrong.request_id].field == "resume.output_token_ids"  # type: ignore[attr-defined]
