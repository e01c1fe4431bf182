"""With speculation, constrained, aborted, parallel and handed-over requests get the tokens that they get without."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from support.engine.answer_proposer import answers_of, draft_from
from support.engine.spec_runs import (
    VOCAB_SIZE,
    Answer,
    always,
    constrained,
    make_engine,
    make_executor,
    new_grammars,
    random_requests,
    run,
)
from support.transfer.handover_harness import Network, finished, idle, make_node, run_until

from baton.worker.core import FinishReason, Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.handover.settings import HandoverSettings

Verifying = Callable[[str], CpuExecutor]
METHODS = pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])


@pytest.fixture
def verifying(small: Path) -> Verifying:
    """Makes an executor that verifies all drafts of a method, whatever they cost."""
    return lambda method: always(
        make_executor(method, 5, model=small, model_folder=small if method == "draft_model" else None)
    )


def with_grammars(executor: CpuExecutor) -> Engine:
    return make_engine(executor, grammars=new_grammars(executor))


def mixed_requests() -> list[Request]:
    """Returns requests of which every second has a constraint; some sample, and some want log-probabilities."""
    requests = random_requests(16, seed=12)
    for index, request in enumerate(requests[::2]):
        constrained(request, index)
    return requests


@METHODS
def test_constrained_requests_among_others_get_the_same_tokens(method: str, small: Path, verifying: Verifying) -> None:
    plain = run(with_grammars(make_executor(model=small)), mixed_requests())
    assert all(answer.tokens for answer in plain.values())
    engine = with_grammars(verifying(method))
    assert run(engine, mixed_requests(), seed=8) == plain
    assert engine.counters().num_accepted_tokens > 0


@pytest.mark.parametrize("method", ["ngram", "answers"])
def test_constrained_requests_are_guessed_for(method: str, small: Path, verifying: Verifying) -> None:
    """Alone and among others, up to the ends of their constraints, and under `min_tokens`."""

    def requests() -> list[Request]:
        made = random_requests(18, seed=21)
        for index, request in enumerate(made):
            constrained(request, index)
            if index % 4 == 1:
                sampling = dataclasses.replace(request.sampling, min_tokens=6, suppressed_token_ids=(2, 4))
                request.sampling, request.stop = sampling, dataclasses.replace(request.stop, min_tokens=6)
            if index % 5 == 2:
                request.stop = dataclasses.replace(request.stop, max_tokens=7)
        return made

    plain = run(with_grammars(make_executor(model=small)), requests())
    assert {answer.reason for answer in plain.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    executor = verifying("ngram")
    if method == "answers":
        answered = requests()
        for request in answered:
            request.token_ids.generated.extend(token_id for token_id, _ in plain[request.request_id].tokens)
        speculator = executor._drafts._speculator
        assert speculator is not None
        draft_from(speculator, answers_of(answered), 0.1, VOCAB_SIZE)
    engine = with_grammars(executor)
    assert run(engine, requests()) == plain
    counters, least = engine.counters(), 3 if method == "answers" else 12
    assert counters.num_accepted_tokens > counters.num_output_tokens // least


@METHODS
def test_samples_of_one_prompt_get_the_same_tokens(method: str, small: Path, verifying: Verifying) -> None:
    """As `n` = 6: one prompt, six seeds, and its blocks shared."""

    def samples() -> list[Request]:
        (request,) = random_requests(1, seed=3)
        prompt = (list(request.token_ids.given) * 3)[:60]
        few = () if method == "draft_model" else (5, 6, 7)  # of which texts repeat some, and which the draft ignores
        sampling = SamplingParams(temperature=0.8, presence_penalty=0.2, logprobs=1, allowed_token_ids=few)
        return [
            Request(
                f"s{seed}", prompt, len(prompt), dataclasses.replace(sampling, seed=seed), StopConditions(30), bytes(16)
            )
            for seed in range(6)
        ]

    plain = run(make_engine(make_executor(model=small)), samples())
    assert len({tuple(token_id for token_id, _ in answer.tokens) for answer in plain.values()}) == 6
    engine = make_engine(verifying(method))
    assert run(engine, samples(), seed=4) == plain
    assert engine.counters().num_accepted_tokens > 0
    assert engine.counters().num_cached_tokens > 0


@METHODS
def test_aborts_at_any_step_leave_the_others_tokens_as_they_are(method: str, small: Path, verifying: Verifying) -> None:
    plain = run(make_engine(make_executor(model=small)), random_requests(16, seed=6))
    engine, found = make_engine(verifying(method)), {request.request_id: Answer() for request in random_requests(16, 6)}
    for request in random_requests(16, seed=6):
        engine.submit(request)
    aborted, step = set[str](), 0
    while engine.has_work():
        outputs = engine.step()
        engine.audit()
        for request, token_id, logprobs in outputs.tokens():
            found[request.request_id].tokens.append((token_id, logprobs))
        if step % 2 == 0 and step < 16:
            aborted.add(f"r{step}")
            engine.abort(f"r{step}")
        step += 1
    for request_id, answer in found.items():
        expected = plain[request_id].tokens
        assert answer.tokens == (expected[: len(answer.tokens)] if request_id in aborted else expected)
    assert engine.counters().num_aborted >= 2
    assert engine.counters().num_accepted_tokens > 0


@METHODS
@pytest.mark.parametrize("guessing_prefill", [False, True])
def test_a_handed_over_request_gets_the_same_tokens(
    network: Network, method: str, small: Path, verifying: Verifying, guessing_prefill: bool
) -> None:
    def requests() -> list[Request]:
        made = random_requests(6, seed=9)
        for request in made:
            request.sampling = dataclasses.replace(request.sampling, prompt_logprobs=None)
            request.remote_prefill = True
        return made

    prefill_executor = verifying(method) if guessing_prefill else make_executor(model=small)
    executors = {"prefill": prefill_executor, "decode": verifying(method)}
    settings = HandoverSettings(verify=True)
    pair = prefill, decode = [make_node(network, name, each, settings) for name, each in executors.items()]
    plain_requests = requests()
    for request in plain_requests:
        request.remote_prefill = False
    plain = run(make_engine(make_executor(model=small)), plain_requests)
    handed = requests()
    for request in handed:
        decode.submit(request, prefill)
    run_until(pair, finished(decode, *handed), seconds=60)
    for request in handed:
        expected = [token_id for token_id, _ in plain[request.request_id].tokens]
        assert decode.seen.tokens[request.request_id] == expected
    run_until(pair, idle(*pair), seconds=60)
    counters = decode.engine.counters()
    assert counters.num_local_fallbacks == 0
    assert counters.num_transferred_tokens > 0
    assert counters.num_accepted_tokens > 0
