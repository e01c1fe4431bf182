"""Constrained requests on the GPU: every text matches its constraint, and other requests' tokens do not change."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.engine.gpu_engines import executor_for, make_model
from support.engine.step_harness import StepHarness
from support.sampling.grammar_rig import (
    Run,
    choices,
    json_schema,
    make_engine,
    make_request,
    regex,
    write_byte_tokenizer,
)
from tokenizers import Tokenizer

from baton.worker.core import SamplingParams, StepPlan
from baton.worker.executors.base import Executor

pytestmark = pytest.mark.gpu

ROWS = 16
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("masks")
    make_model("llama-128", made)
    write_byte_tokenizer(made)
    return made


@pytest.fixture(scope="module", params=["graphs", "eager", "invariant"])
def executor(request: pytest.FixtureRequest, folder: Path) -> Iterator[Executor]:
    made = executor_for(folder, cuda_graphs=request.param != "eager", batch_invariant=request.param == "invariant")
    yield made
    made.close()


def test_texts_match_their_constraints(executor: Executor, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos = frozenset(executor.model.eos_token_ids)
    engine, grammars = make_engine(executor, folder, rows=ROWS, budget=256)
    run = Run(engine)
    penalized = SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.2, frequency_penalty=0.5, logprobs=2)
    texts = {
        "json": [make_request([9, i], json_schema(SCHEMA, no_whitespace=True), seed=i, eos=eos) for i in range(12)],
        "regex": [make_request([8, i], regex("[a-c]{3}-[0-9]{2}"), seed=i, eos=eos) for i in range(6)],
        "choice": [make_request([7, i], choices("yes", "no"), seed=i, eos=eos) for i in range(6)],
        "edited": [make_request([6, i], regex("[0-9]{12}"), sampling=penalized, eos=eos) for i in range(2)],
    }
    run.run(*(request for requests in texts.values() for request in requests))
    assert run.failures == {}

    def text_of(name: str) -> list[str]:
        tokens = [run.tokens[request.request_id] for request in texts[name]]
        return [tokenizer.decode([token for token in each if token not in eos]) for each in tokens]

    assert all(set(json.loads(text)) == {"name", "age"} for text in text_of("json"))
    assert all(re.fullmatch("[a-c]{3}-[0-9]{2}", text) for text in text_of("regex"))
    assert set(text_of("choice")) <= {"yes", "no"}
    assert all(re.fullmatch("[0-9]{12}", text) for text in text_of("edited"))
    assert all(len(run.logprobs[request.request_id]) >= 1 for request in texts["edited"])
    grammars.close()


@pytest.mark.parametrize("executor", ["invariant"], indirect=True)
def test_unconstrained_requests_get_the_tokens_that_they_get_alone(executor: Executor, folder: Path) -> None:
    def plain() -> list[list[int]]:
        return [[20 + i, 30, 40] for i in range(8)]

    engine, grammars = make_engine(executor, folder, rows=ROWS, budget=256)
    alone = Run(engine).run(*(make_request(each, max_tokens=40, seed=1, eos=frozenset()) for each in plain()))
    mixed = Run(engine)
    others = [make_request([5, i], json_schema(SCHEMA), seed=i) for i in range(8)]
    watched = [make_request(each, max_tokens=40, seed=1, eos=frozenset()) for each in plain()]
    mixed.run(*others, *watched)
    assert mixed.failures == {}
    assert [mixed.tokens[request.request_id] for request in watched] == alone
    grammars.close()


@pytest.mark.parametrize("executor", ["invariant"], indirect=True)
def test_masks_that_follow_their_launch_change_no_token(executor: Executor, folder: Path) -> None:
    """At depth 1 every mask is known at its launch."""
    penalized = SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.2, frequency_penalty=0.5, logprobs=2)

    def tokens_at(depth: int) -> list[list[int]]:
        executor.depth = depth
        engine, grammars = make_engine(executor, folder, rows=ROWS, budget=256)
        requests = [make_request([9, i], json_schema(SCHEMA), max_tokens=80, seed=i) for i in range(12)]
        requests += [make_request([6, i], regex("[0-9]{30}"), sampling=penalized) for i in range(4)]
        requests += [make_request([5, i], sampling=penalized, max_tokens=40, eos=frozenset()) for i in range(4)]
        run = Run(engine)
        tokens = run.run(*requests)
        assert run.failures == {}
        grammars.close()
        return tokens

    try:
        ahead = tokens_at(2)
        assert ahead == tokens_at(1)
    finally:
        executor.depth = 2


@pytest.mark.parametrize("executor", ["graphs", "eager"], indirect=True)
def test_constrained_rows_take_every_step(executor: Executor, folder: Path) -> None:
    engine, grammars = make_engine(executor, folder, rows=ROWS, budget=256)
    run = Run(engine)
    constrained = [make_request([8, i], regex("[0-9]{100}"), seed=i) for i in range(4)]
    other = make_request([7], max_tokens=1000, eos=frozenset())
    for request in (*constrained, other):
        engine.submit(request)
    run.drain(until=lambda: all(request.request_id in run.tokens for request in constrained))
    begun = engine.counters().num_steps
    run.drain(until=lambda: all(request.request_id in run.reasons for request in constrained))
    steps = engine.counters().num_steps - begun
    engine.abort(other.request_id)
    run.drain()
    grammars.close()
    # At every second step it would be 200, and here a step is hardly longer than a mask takes.
    assert steps < 170


@pytest.mark.parametrize("executor", ["graphs", "eager"], indirect=True)
def test_a_row_that_is_left_out_gets_its_token_later(executor: Executor) -> None:
    params = SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.2, frequency_penalty=0.5, logprobs=2)
    expected = StepHarness(executor)
    one, other = expected.admit([50, 51, 52], params), expected.admit([60, 61], replace(params, seed=9))
    for _ in range(5):
        expected.run_step()
    got = StepHarness(executor)
    late, too = got.admit([50, 51, 52], params), got.admit([60, 61], replace(params, seed=9))
    got.run_step()
    plan = StepPlan(
        got.step,
        rows=np.array([late.row, too.row], np.int32),
        num_scheduled_tokens=np.ones(2, np.int32),
        num_computed_tokens=np.array([late.num_computed, too.num_computed], np.int32),
        samples=np.ones(2, np.bool_),
        num_decodes=2,
        masks_follow=True,
    )
    executor.launch(plan)
    executor.draw(None, np.zeros(1, np.int32))
    result = executor.collect()
    assert result.counts.tolist() == [0, 1]
    assert list(result.logprobs) == [0]
    too.token_ids += result.token_ids.tolist()
    too.num_computed += 1
    got.step += 1
    for _ in range(3):
        got.run_step()
    assert late.output == one.output[:4]
    assert too.output == other.output
