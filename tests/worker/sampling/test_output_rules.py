"""Sequences that may not come and reasoning that must end, on every executor, whatever the batch and preemptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.engine_harness import make_executor, make_request, make_rig, prompt_of

from baton.worker.config import WorkerConfig
from baton.worker.core import ReasoningLimit, SamplingParams
from baton.worker.executors.base import Executor
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.sampling.output_rules import OutputRules

SAMPLE_MODEL = Path(__file__).resolve().parents[3] / "models" / "storyteller-7m"
VOCAB_SIZE = 6
TOKEN = st.integers(0, VOCAB_SIZE - 1)
SEQUENCES = st.lists(st.lists(TOKEN, min_size=1, max_size=4).map(tuple), max_size=6).map(tuple)


def contains(output: Sequence[int], sequence: Sequence[int]) -> bool:
    return any(list(output[at : at + len(sequence)]) == list(sequence) for at in range(len(output)))


@given(SEQUENCES, st.lists(TOKEN, max_size=12))
def test_a_token_is_forbidden_where_it_would_complete_a_sequence(
    sequences: tuple[tuple[int, ...], ...], output: list[int]
) -> None:
    rules = OutputRules(SamplingParams(forbidden_sequences=sequences), output[:3])
    for token_id in output[3:]:
        rules.add(token_id)
    naive = {
        token_id for token_id in range(VOCAB_SIZE) for each in sequences if (*output, token_id)[-len(each) :] == each
    }
    assert set(rules.forbidden()) == naive


def drawn_under(limit: ReasoningLimit, likes: Sequence[int], count: int) -> list[int]:
    """The output of a model that likes these tokens."""
    rules = OutputRules(SamplingParams(reasoning_limit=limit), ())
    output: list[int] = []
    for index in range(count):
        forced = rules.forced()
        output.append(likes[index % len(likes)] if forced is None else forced)
        rules.add(output[-1])
    return output


@pytest.mark.parametrize(
    ("limit", "likes", "expected"),
    [
        (ReasoningLimit(3, (8, 9)), [1], [1, 1, 1, 8, 9, 1, 1]),
        (ReasoningLimit(0, (9,)), [1], [9, 1, 1, 1, 1, 1, 1]),
        (ReasoningLimit(2, (9,), 7), [7, 1, 1, 1, 1, 1, 1], [7, 1, 1, 9, 1, 1, 1]),
        (ReasoningLimit(2, (9,), 7), [1], [1] * 7),  # there is no reasoning
        (ReasoningLimit(3, (9,)), [1, 9, 2, 2, 2, 2, 2], [1, 9, 2, 2, 2, 2, 2]),  # it ends by itself
        (ReasoningLimit(3, (8, 9)), [1, 1, 8, 1, 1, 1, 1], [1, 1, 8, 8, 9, 1, 1]),  # it was about to
    ],
)
def test_reasoning_ends_at_its_limit(limit: ReasoningLimit, likes: list[int], expected: list[int]) -> None:
    assert drawn_under(limit, likes, 7) == expected


def cpu_executor(num_blocks: int) -> Executor:
    config = WorkerConfig(model=str(SAMPLE_MODEL), threads=1, block_size=4, num_blocks=num_blocks, max_num_requests=32)
    return CpuExecutor(config)


@pytest.fixture(params=["cpu", "sim"])
def executor_of(request: pytest.FixtureRequest) -> Callable[[int], Executor]:
    return cpu_executor if request.param == "cpu" else lambda num_blocks: make_executor(num_blocks=num_blocks)


@pytest.mark.parametrize("num_blocks", [128, 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_sequences_are_not_repeated(
    executor_of: Callable[[int], Executor], num_blocks: int, temperature: float
) -> None:
    rig = make_rig(executor_of(num_blocks), max_num_batched_tokens=32)  # type: ignore[arg-type]
    prompt = prompt_of(9)

    def ask(forbidden: tuple[tuple[int, ...], ...]) -> list[list[int]]:
        sampling = SamplingParams(temperature=temperature, seed=3, forbidden_sequences=forbidden)
        return rig.run(*(make_request(prompt, 24, sampling=sampling) for _ in range(3)))

    free, *same = ask(())
    assert same == [free, free]
    forbidden = (tuple(free[2:4]), tuple(free[7:10]), (free[12],), tuple(free[20:24]), (4000, 4001, 4002))
    bent, *others = ask(forbidden)
    assert others == [bent, bent]
    assert not any(contains(bent, each) for each in forbidden)
    assert bent != free
    assert (rig.engine.counters().num_preemptions > 0) == (num_blocks == 16)
    rig.assert_nothing_held()


def test_reasoning_ends_on_every_executor(executor_of: Callable[[int], Executor]) -> None:
    rig = make_rig(executor_of(128))  # type: ignore[arg-type]
    prompt = prompt_of(9)
    (free,) = rig.run(make_request(prompt, 12))
    limit = ReasoningLimit(4, (77, 78))
    sampling = SamplingParams(temperature=0.0, reasoning_limit=limit, forbidden_sequences=((77, 78),))
    (bent,) = rig.run(make_request(prompt, 12, sampling=sampling))
    assert bent[:6] == [*free[:4], 77, 78]


def test_asked_alternatives_are_given_in_their_order(executor_of: Callable[[int], Executor]) -> None:
    rig = make_rig(executor_of(128))  # type: ignore[arg-type]
    asked = SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=(9, 5, 9))
    plain = SamplingParams(temperature=0.0, logprobs=2)
    for request in (make_request(prompt_of(9), 4, sampling=each) for each in (asked, plain)):
        rig.engine.submit(request)
    found: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
    while rig.engine.has_work():
        for request, _, logprobs in rig.engine.step().tokens():
            assert logprobs is not None
            wanted = request.sampling.logprob_token_ids
            found.setdefault(wanted, []).append(logprobs.top_logprobs)
            assert len(logprobs.top_token_ids) == len(wanted or (0, 0))
            assert not wanted or logprobs.top_token_ids == wanted
    assert len(found[9, 5, 9]) == len(found[()]) == 4
    assert all(first == last and first <= 0 for first, _, last in found[9, 5, 9])


def test_asked_alternatives_have_the_models_own_log_probabilities() -> None:
    rig = make_rig(cpu_executor(128))  # type: ignore[arg-type]
    every = SamplingParams(temperature=0.0, logprobs=20)
    rig.engine.submit(make_request(prompt_of(9), 1, sampling=every))
    ((_, _, top),) = rig.step().tokens()
    assert top is not None
    asked = SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=top.top_token_ids[::-1])
    rig.engine.submit(make_request(prompt_of(9), 1, sampling=asked))
    ((_, _, chosen),) = rig.step().tokens()
    assert chosen is not None
    assert np.allclose(chosen.top_logprobs[::-1], top.top_logprobs, atol=1e-4)
