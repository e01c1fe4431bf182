"""With speculation, every request gets the tokens and log-probabilities that it gets without, bit for bit."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from baton.worker.config import WorkerConfig
from baton.worker.core import (
    FinishReason,
    Int32,
    ReasoningLimit,
    Request,
    RowInit,
    SamplingParams,
    StopConditions,
    TokenLogprobs,
)
from baton.worker.engine.engine import Engine
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.scheduling.settings import EngineSettings

MODEL = Path(__file__).resolve().parents[3] / "models" / "storyteller-7m"
VOCAB_SIZE = 4096
BLOCK_SIZE = 16
STORY = (
    "Once upon a time, there was a little boat. The little boat was red. Tom saw the little boat and said, "
    '"What a nice little boat!" Tom and the little boat went down the river. The little boat was happy. '
)


@dataclass
class Answer:
    """All that a client gets of a request."""

    tokens: list[tuple[int, TokenLogprobs | None]] = field(default_factory=list)
    prompt: list[object] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_token_id: int | None = None


class AnswerProposer:
    """Implements Proposer: guesses the tokens of an earlier run, with mistakes."""

    def __init__(self, answers: dict[bytes, list[int]], mistakes: float, seed: int) -> None:
        self._answers = answers  # by the prompt
        self._mistakes = mistakes
        self._random = random.Random(seed)
        self._rows: dict[int, tuple[int, list[int]]] = {}

    def admit(self, init: RowInit) -> None:
        prompt = init.token_ids[: init.num_prompt_tokens]
        self._rows[init.row] = (len(prompt), self._answers.get(prompt.tobytes(), []))

    def free(self, row: int, token_ids: Int32) -> None:
        self._rows.pop(row)

    def propose(self, row: int, token_ids: Int32, most: int) -> Int32:
        num_prompt, answer = self._rows[row]
        begun = len(token_ids) - num_prompt
        known = answer[begun : begun + self._random.randint(0, most)]
        wrong = [self._random.randrange(VOCAB_SIZE) if self._random.random() < self._mistakes else t for t in known]
        return np.array(wrong, np.int32)


def make_executor(method: str = "", most: int = 6, num_blocks: int = 600, dtype: str = "float32") -> CpuExecutor:
    """Returns an executor with speculation by a method; empty: without, and with the same sums."""
    text = json.dumps({"method": method, "num_speculative_tokens": most}) if method else ""
    config = WorkerConfig(
        executor="cpu",
        model=str(MODEL),
        dtype=dtype,
        threads=1,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_requests=24,
        batch_invariant=True,
        speculative_config=text,
    )
    config.validate()
    return CpuExecutor(config)


def make_engine(executor: CpuExecutor, budget: int = 512) -> Engine:
    settings = EngineSettings(max_num_requests=24, max_num_batched_tokens=budget, cache_outputs=False)
    return Engine(executor, settings, epoch=1)


def run(engine: Engine, requests: list[Request], seed: int = 0) -> dict[str, Answer]:
    """Submits requests at random steps."""
    arrivals, waiting = random.Random(seed), list(requests)
    found = {request.request_id: Answer() for request in requests}
    for _ in range(100_000):
        while waiting and arrivals.random() < 0.6:
            engine.submit(waiting.pop(0))
        if not waiting and not engine.has_work():
            engine.audit()
            return found
        outputs = engine.step()
        assert not outputs.failures, outputs.failures
        for request, token_id, logprobs in outputs.tokens():
            found[request.request_id].tokens.append((token_id, logprobs))
        for request, first, entries in outputs.prompt_logprobs:
            answer = found[request.request_id]
            assert first == 1 + len(answer.prompt)
            answer.prompt += entries
        for finish in outputs.finishes:
            answer = found[finish.request_id]
            answer.reason, answer.stop_token_id = finish.reason, finish.stop_token_id
    raise AssertionError("the engine does not finish")


def random_sampling(rng: random.Random) -> SamplingParams:
    """Returns parameters of which each is at its default in most cases."""

    def some(value: object, default: object, chance: float = 0.25) -> object:
        return value if rng.random() < chance else default

    tokens = [rng.randrange(5, VOCAB_SIZE) for _ in range(8)]
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.3, 0.8, 1.0, 1.5]),
        top_p=some(rng.uniform(0.5, 1.0), 1.0),  # type: ignore[arg-type]
        top_k=some(rng.randint(1, 50), 0),  # type: ignore[arg-type]
        min_p=some(rng.uniform(0.0, 0.2), 0.0),  # type: ignore[arg-type]
        seed=rng.getrandbits(63),
        presence_penalty=some(rng.uniform(-1, 1), 0.0),  # type: ignore[arg-type]
        frequency_penalty=some(rng.uniform(-1, 1), 0.0),  # type: ignore[arg-type]
        repetition_penalty=some(rng.uniform(0.8, 1.3), 1.0),  # type: ignore[arg-type]
        logit_bias=some(tuple((token, rng.uniform(-5, 5)) for token in tokens[:3]), ()),  # type: ignore[arg-type]
        allowed_token_ids=some(tuple(range(5, 2000)), (), 0.1),  # type: ignore[arg-type]
        logprobs=some(rng.randint(0, 3), None, 0.4),  # type: ignore[arg-type]
        prompt_logprobs=some(1, None, 0.1),  # type: ignore[arg-type]
        min_tokens=some(6, 0),  # type: ignore[arg-type]
        suppressed_token_ids=(2, 4),
        forbidden_sequences=some(((tokens[0],), (260, tokens[1])), (), 0.2),  # type: ignore[arg-type]
        reasoning_limit=some(ReasoningLimit(5, (tokens[2], tokens[3])), None, 0.1),  # type: ignore[arg-type]
    )


def random_requests(count: int, seed: int) -> list[Request]:
    """Returns requests of mixed parameters, each with a prompt of its own."""
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    story = tokenizer.encode(STORY, add_special_tokens=False).ids
    requests = []
    for index in range(count):
        start = rng.randrange(len(story))
        prompt = [1, *(rng.randrange(5, VOCAB_SIZE) for _ in range(2)), *(story[start:] + story)[: rng.randint(1, 90)]]
        ends = frozenset((2, 4)) if rng.random() < 0.7 else frozenset()
        sampling = random_sampling(rng)
        most = rng.randint(1, 48)
        stop = StopConditions(most, min(sampling.min_tokens, most), ends, frozenset(rng.sample(range(5, 400), 3)))
        requests.append(Request(f"r{index}", prompt, len(prompt), sampling, stop, bytes(16)))
    return requests


def draft_from_answers(executor: CpuExecutor, requests: list[Request], mistakes: float) -> None:
    """Makes the executor's drafts mostly right, and all of them verified."""
    answers = {request.token_ids.given.tobytes(): list(request.token_ids.generated) for request in requests}
    speculator = executor._drafts._speculator
    assert speculator is not None
    speculator._proposer = AnswerProposer(answers, mistakes, seed=3)
    speculator.lengths.choose = lambda rows, available: available  # type: ignore[method-assign]


@pytest.fixture(
    scope="module",
    params=[
        ("float32", 40),
        ("bfloat16", 20),
        pytest.param(("float32", 10_000), marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
    ids=str,
)
def given(request: pytest.FixtureRequest) -> tuple[str, int]:
    """The dtype, and the number of requests."""
    dtype, count = request.param
    return str(dtype), int(count)


@pytest.fixture(scope="module")
def plain(given: tuple[str, int]) -> dict[str, Answer]:
    dtype, count = given
    return run(make_engine(make_executor(dtype=dtype)), random_requests(count, seed=1))


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_proposers_change_no_bit(method: str, given: tuple[str, int], plain: dict[str, Answer]) -> None:
    dtype, count = given
    engine = make_engine(make_executor(method, dtype=dtype))
    assert run(engine, random_requests(count, seed=1), seed=8) == plain
    assert engine.counters().num_accepted_tokens > 0


@pytest.mark.parametrize(("mistakes", "most", "num_blocks"), [(0.3, 9, 600), (0.1, 6, 20)])
def test_right_and_wrong_drafts_change_no_bit(
    mistakes: float, most: int, num_blocks: int, given: tuple[str, int], plain: dict[str, Answer]
) -> None:
    dtype, count = given
    answered = random_requests(count, seed=1)
    for request in answered:
        request.token_ids.generated.extend(token_id for token_id, _ in plain[request.request_id].tokens)
    executor = make_executor("ngram", most, num_blocks, dtype)
    draft_from_answers(executor, answered, mistakes)
    engine = make_engine(executor, 200)
    assert run(engine, random_requests(count, seed=1), seed=9) == plain
    counters = engine.counters()
    assert 0 < counters.num_accepted_tokens <= counters.num_draft_tokens
    assert sum(counters.accepted_by_place) == counters.num_accepted_tokens
    assert (counters.num_preemptions > 0) is (num_blocks < 100)


def test_a_resumed_output_continues_with_the_tokens_of_one_without_drafts() -> None:
    (request,) = random_requests(1, seed=3)
    request.sampling = SamplingParams(temperature=0.9, seed=5, frequency_penalty=0.4, logprobs=1)
    request.stop = StopConditions(40)
    executor = make_executor("suffix")
    (whole,) = run(make_engine(make_executor()), [request]).values()
    begun = [token_id for token_id, _ in whole.tokens[:13]]
    prompt = list(request.token_ids.given)
    resumed = Request("again", prompt + begun, len(prompt), request.sampling, request.stop, bytes(16))
    (rest,) = run(make_engine(executor), [resumed]).values()
    assert rest.tokens == whole.tokens[13:]


def test_a_proposer_that_fails_costs_drafts_and_no_token(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(AnswerProposer):
        def propose(self, row: int, token_ids: Int32, most: int) -> Int32:
            if row % 2:
                raise RuntimeError("no guess")
            return np.array([VOCAB_SIZE + 5, -3], np.int32)

    executor = make_executor("ngram")
    speculator = executor._drafts._speculator
    assert speculator is not None
    speculator._proposer = Broken({}, 0.0, 0)
    engine = make_engine(executor)
    plain = run(make_engine(make_executor()), random_requests(6, seed=4))
    assert run(engine, random_requests(6, seed=4)) == plain
    assert engine.counters().num_draft_tokens == 0
    assert executor._drafts.num_failed > 0
    assert "the proposer Broken failed" in caplog.text
