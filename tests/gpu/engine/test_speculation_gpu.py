"""On a GPU too, every request gets the tokens and log-probabilities with speculation that it gets without."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engine import gpu_engines
from support.engine.answer_proposer import answers_of, draft_always
from support.engine.gpu_engines import engine_over, executor_for, generate, leader_of, make_model, make_prompts
from support.engine.spec_runs import MODEL, VOCAB_SIZE, Answer, random_requests, run

from baton.worker.core import SamplingParams
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor
from baton.worker.executors.cuda.drafts.verified_steps import VerifiedSteps
from baton.worker.scheduling.settings import EngineSettings

pytestmark = pytest.mark.gpu

COUNT = 1000
ROWS = 96
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=7, logprobs=3)


def storyteller(most: int = 0, num_blocks: int = 4000) -> Executor:
    """Returns an executor with at most so many drafts; 0: without speculation, and with the same sums."""
    config = {"speculative_config": json.dumps({"num_speculative_tokens": most})} if most else {}
    return executor_for(
        MODEL, dtype="bfloat16", batch_invariant=True, num_blocks=num_blocks, max_num_requests=4 * ROWS, **config
    )


def engine(executor: Executor, budget: int = 512) -> Engine:
    settings = EngineSettings(max_num_requests=ROWS, max_num_batched_tokens=budget, cache_outputs=False)
    return Engine(executor, settings, epoch=1)


def verified_of(executor: Executor) -> VerifiedSteps:
    verified = leader_of(executor).verified
    assert verified is not None
    return verified


@pytest.fixture(scope="module")
def plain() -> dict[str, Answer]:
    return run(engine(storyteller()), random_requests(COUNT, seed=1))


def answered(plain: dict[str, Answer]) -> dict[bytes, list[int]]:
    requests = random_requests(COUNT, seed=1)
    for request in requests:
        request.token_ids.generated.extend(token_id for token_id, _ in plain[request.request_id].tokens)
    return answers_of(requests)


def test_looked_up_drafts_change_no_bit(plain: dict[str, Answer]) -> None:
    one = engine(storyteller(6))
    assert run(one, random_requests(COUNT, seed=1), seed=8) == plain
    assert one.counters().num_accepted_tokens > 0


@pytest.mark.parametrize(("mistakes", "most", "num_blocks"), [(0.3, 9, 4000), (0.1, 4, 120)])
def test_right_and_wrong_drafts_change_no_bit(
    mistakes: float, most: int, num_blocks: int, plain: dict[str, Answer]
) -> None:
    executor = storyteller(most, num_blocks)
    draft_always(verified_of(executor), answered(plain), mistakes, VOCAB_SIZE)
    one = engine(executor, 300)
    assert run(one, random_requests(COUNT, seed=1), seed=9) == plain
    counters = one.counters()
    assert 1000 < counters.num_accepted_tokens <= counters.num_draft_tokens
    assert (counters.num_preemptions > 0) is (num_blocks < 1000)


@pytest.mark.parametrize("name", ["llama-128", "qwen3-96", "mistral-window-64", "granite-128", "olmo2-64"])
def test_in_other_families_drafts_change_no_bit(name: str, tmp_path: Path) -> None:
    make_model(name, tmp_path, torch.bfloat16)
    prompts = make_prompts(seed=11)
    options = {"dtype": "bfloat16", "batch_invariant": True}
    found = generate(engine_over(executor_for(tmp_path, **options), cache_outputs=False), prompts, 40, SAMPLED)
    executor = executor_for(tmp_path, **options, speculative_config='{"num_speculative_tokens": 5}')
    answers = {
        np.array(prompt, np.int32).tobytes(): list(one.token_ids) for prompt, one in zip(prompts, found, strict=True)
    }
    draft_always(verified_of(executor), answers, 0.2, gpu_engines.VOCAB_SIZE)
    one = engine_over(executor, cache_outputs=False)
    assert generate(one, prompts, 40, SAMPLED, stagger=2) == found
    assert one.counters().num_accepted_tokens > 100
