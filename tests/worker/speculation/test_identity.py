"""With speculation, every request gets the tokens and log-probabilities that it gets without, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.engine.answer_proposer import AnswerProposer, answers_of, draft_from
from support.engine.spec_runs import VOCAB_SIZE, Answer, always, make_engine, make_executor, random_requests, run

from baton.worker.core import Int32, Request, SamplingParams, StopConditions
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.speculation.proposer import EachRow


def draft_from_answers(executor: CpuExecutor, requests: list[Request], mistakes: float) -> None:
    """Makes the executor's drafts mostly right, and all of them verified."""
    speculator = executor._drafts._speculator
    assert speculator is not None
    draft_from(speculator, answers_of(requests), mistakes, VOCAB_SIZE)


@pytest.fixture(
    scope="module",
    params=[("float32", 40), ("bfloat16", 20)],
    ids=str,
)
def given(request: pytest.FixtureRequest) -> tuple[str, int]:
    """The dtype, and the number of requests."""
    dtype, count = request.param
    return str(dtype), int(count)


@pytest.fixture(scope="module")
def plain(small: Path, given: tuple[str, int]) -> dict[str, Answer]:
    dtype, count = given
    return run(make_engine(make_executor(dtype=dtype, model=small)), random_requests(count, seed=1))


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_proposers_change_no_bit(method: str, small: Path, given: tuple[str, int], plain: dict[str, Answer]) -> None:
    dtype, count = given
    engine = make_engine(always(make_executor(method, dtype=dtype, model=small)))
    assert run(engine, random_requests(count, seed=1), seed=8) == plain
    assert engine.counters().num_accepted_tokens > 0


@pytest.mark.parametrize(("mistakes", "most", "num_blocks"), [(0.3, 9, 600), (0.1, 6, 20)])
def test_right_and_wrong_drafts_change_no_bit(
    mistakes: float, most: int, num_blocks: int, small: Path, given: tuple[str, int], plain: dict[str, Answer]
) -> None:
    dtype, count = given
    answered = random_requests(count, seed=1)
    for request in answered:
        request.token_ids.generated.extend(token_id for token_id, _ in plain[request.request_id].tokens)
    executor = make_executor("ngram", most, num_blocks, dtype, model=small)
    draft_from_answers(executor, answered, mistakes)
    engine = make_engine(executor, 200)
    assert run(engine, random_requests(count, seed=1), seed=9) == plain
    counters = engine.counters()
    assert 0 < counters.num_accepted_tokens <= counters.num_draft_tokens
    assert sum(counters.accepted_by_place) == counters.num_accepted_tokens
    assert (counters.num_preemptions > 0) is (num_blocks < 100)


def test_a_resumed_output_continues_with_the_tokens_of_one_without_drafts(small: Path) -> None:
    (request,) = random_requests(1, seed=3)
    request.sampling = SamplingParams(temperature=0.9, seed=5, frequency_penalty=0.4, logprobs=1)
    request.stop = StopConditions(40)
    executor = always(make_executor("suffix", model=small))
    (whole,) = run(make_engine(make_executor(model=small)), [request]).values()
    begun = [token_id for token_id, _ in whole.tokens[:13]]
    prompt = list(request.token_ids.given)
    resumed = Request("again", prompt + begun, len(prompt), request.sampling, request.stop, bytes(16))
    (rest,) = run(make_engine(executor), [resumed]).values()
    assert rest.tokens == whole.tokens[13:]


def test_a_proposer_that_fails_costs_drafts_and_no_token(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(AnswerProposer):
        def propose(self, row: int, token_ids: Int32, most: int) -> Int32:
            if row % 2:
                raise RuntimeError("no guess")
            return np.array([VOCAB_SIZE + 5, -3], np.int32)

    executor = make_executor("ngram", model=small)
    speculator = executor._drafts._speculator
    assert speculator is not None
    speculator._proposer = EachRow(Broken({}, 0.0, 0, VOCAB_SIZE))
    speculator._name = "broken"
    engine = make_engine(executor)
    plain = run(make_engine(make_executor(model=small)), random_requests(6, seed=4))
    assert run(engine, random_requests(6, seed=4)) == plain
    assert engine.counters().num_draft_tokens == 0
    assert engine.counters().num_proposer_failures > 0
    assert "the proposer broken failed" in caplog.text
