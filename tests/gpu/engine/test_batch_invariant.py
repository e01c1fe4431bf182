"""Batch-invariant mode: a request has the same bits in any batch, as seen in its log-probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.gpu_engines import (
    check_greedy,
    engine_over,
    executor_for,
    generate,
    make_model,
    make_prompts,
    tokens_of,
)
from transformers import PreTrainedModel

from baton.worker.core import SamplingParams
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor

pytestmark = pytest.mark.gpu

COUNT = 40
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=7, logprobs=3)


@pytest.fixture(scope="module", params=["llama-128", "qwen3-96", "mistral-window-64", "granite-128", "olmo2-64"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_model(request.param, folder, torch.bfloat16)


@pytest.fixture(scope="module")
def executor(subject: tuple[Path, PreTrainedModel]) -> Executor:
    return executor_for(subject[0], dtype="bfloat16", batch_invariant=True)


def engine(executor: Executor, budget: int = 400) -> Engine:
    return engine_over(executor, budget, cache_outputs=False)


def bits(found: object) -> list[object]:
    return [(one.token_ids, one.logprobs) for one in found]


def test_alone_and_in_a_crowd_every_bit_is_the_same(subject: tuple[Path, PreTrainedModel], executor: Executor) -> None:
    prompts = make_prompts(seed=11)
    together = bits(generate(engine(executor), prompts, COUNT, SAMPLED))
    for index in (0, 1, 3, 4, 13, 14, 19):
        alone = bits(generate(engine(executor), [prompts[index]], COUNT, SAMPLED))
        assert alone == [together[index]], f"prompt of {len(prompts[index])}"


@pytest.mark.parametrize("budget", [20, 33, 150])
def test_however_prompts_are_cut_and_mixed_with_decodes(executor: Executor, budget: int) -> None:
    prompts = make_prompts(seed=12)
    whole = bits(generate(engine(executor), prompts, COUNT, SAMPLED))
    assert bits(generate(engine(executor, budget), prompts, COUNT, SAMPLED, stagger=2)) == whole


def test_preemptions_and_prefix_hits_leave_no_trace(subject: tuple[Path, PreTrainedModel], executor: Executor) -> None:
    shared = make_prompts((100,), seed=13)[0]
    prompts = [shared + tail for tail in make_prompts((1, 30, 50, 70, 33, 21), seed=14)]
    tight = engine(executor_for(subject[0], dtype="bfloat16", batch_invariant=True, num_blocks=28), 64)
    found = bits(generate(tight, prompts, COUNT, SAMPLED, stagger=2))
    assert tight.counters().num_preemptions > 0
    assert tight.counters().num_cached_tokens > 0
    for index, prompt in enumerate(prompts):
        assert bits(generate(engine(executor), [prompt], COUNT, SAMPLED)) == [found[index]]


def test_a_prompt_that_holds_anothers_output_is_computed_as_a_prompt(executor: Executor) -> None:
    (first,) = make_prompts((64,), seed=15)
    one = engine(executor)
    (output,) = tokens_of(generate(one, [first], COUNT))
    follow_up = [first + output + [9, 8, 7]]
    warm = bits(generate(one, follow_up, COUNT, SAMPLED))
    assert warm == bits(generate(engine(executor), follow_up, COUNT, SAMPLED))


def test_the_tokens_are_right(subject: tuple[Path, PreTrainedModel], executor: Executor) -> None:
    prompts = make_prompts(seed=16)
    found = tokens_of(generate(engine(executor), prompts))
    assert check_greedy(subject[1], prompts, found, 0.06) > 100
