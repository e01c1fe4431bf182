"""An EAGLE-3 head on a GPU: in fp32 the formula's guesses, and in bf16 no request's answer changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.engine.answer_proposer import verify_always
from support.engine.eagle3_heads import PlainHead, write_head
from support.engine.gpu_engines import executor_for, leader_of
from support.engine.spec_runs import MODEL, VOCAB_SIZE, random_requests, run
from support.engine.watched_proposer import watched
from transformers import AutoModelForCausalLM

from baton.worker.core import Request, SamplingParams, StopConditions
from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor
from baton.worker.executors.cuda.eagle3 import CudaEagle3
from baton.worker.scheduling.settings import EngineSettings

pytestmark = pytest.mark.gpu

COUNT = 200
ROWS = 32
LAYERS = (2, 4, 5)  # of the sample model's 8
MOST = 3


def engine(executor: Executor) -> Engine:
    return Engine(executor, EngineSettings(ROWS, 300, cache_outputs=False), epoch=1)


def storyteller(head: Path | None = None, num_blocks: int = 2000, dtype: str = "bfloat16") -> Executor:
    settings = {"method": "eagle3", "model": str(head), "num_speculative_tokens": MOST}
    return executor_for(
        MODEL,
        dtype=dtype,
        batch_invariant=True,
        num_blocks=num_blocks,
        max_num_requests=4 * ROWS,
        speculative_config=json.dumps(settings) if head is not None else "",
    )


def proposer_of(executor: Executor) -> CudaEagle3:
    """Has all drafts verified, whatever they cost. Returns what guesses."""
    verified = leader_of(executor).verified
    assert verified is not None
    verify_always(verified)
    assert isinstance(verified.speculator._proposer, CudaEagle3)
    return verified.speculator._proposer


def noisy_requests() -> list[Request]:
    """Returns requests of which every second is mostly noise, which a random head shares with the model."""
    requests = random_requests(COUNT, seed=4)
    for index, request in enumerate(requests[::2]):
        request.sampling = SamplingParams(temperature=5.0, seed=index, logprobs=1)
    return requests


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True}], ids=str)
def test_guesses_are_those_of_the_formula(tmp_path: Path, changes: dict[str, bool]) -> None:
    write_head(tmp_path / "head", VOCAB_SIZE, changes)
    executor = storyteller(tmp_path / "head", dtype="float32")
    seen = watched(proposer_of(executor))
    requests = random_requests(6, seed=6)
    for request in requests:
        request.sampling, request.stop = SamplingParams(temperature=0.0), StopConditions(24)
    run(engine(executor), requests)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    plain = PlainHead(tmp_path / "head", model, LAYERS, residual_is_normed=bool(changes))
    guessed = [(text, guess) for text, guess in seen if guess]
    assert len(guessed) > 60
    different = sum(guess != plain.guess(text, len(guess)) for text, guess in guessed)
    # Two of 1,000 logits may be equal but for rounding.
    assert different <= len(guessed) // 50


@pytest.mark.parametrize("num_blocks", [2000, 80])
def test_its_drafts_change_no_bit(tmp_path: Path, num_blocks: int) -> None:
    plain = run(engine(storyteller()), noisy_requests())
    write_head(tmp_path / "head", VOCAB_SIZE)
    executor = storyteller(tmp_path / "head", num_blocks)
    proposer_of(executor)
    one = engine(executor)
    assert run(one, noisy_requests(), seed=8) == plain
    counters = one.counters()
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    assert counters.num_draft_tokens > 1000
    assert counters.num_proposer_failures == 0
    assert (counters.num_preemptions > 0) is (num_blocks < 1000)
