"""Constrained requests on the GPU: every text is what was asked for, and nobody else's tokens change."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine.gpu_engines import executor_for, make_model
from support.engine.grammar_rig import Run, choices, json_schema, make_engine, make_request, regex, write_byte_tokenizer
from tokenizers import Tokenizer

from baton.worker.core import SamplingParams
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


def test_texts_are_what_was_asked_for(executor: Executor, folder: Path) -> None:
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
