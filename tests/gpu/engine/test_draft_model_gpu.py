"""A draft model on a GPU: most of what it guesses of its own answers is right, and no request's answer changes."""

from __future__ import annotations

import json

import pytest
from support.engine.answer_proposer import verify_always
from support.engine.gpu_engines import executor_for, leader_of
from support.engine.spec_runs import MODEL, random_requests, run

from baton.worker.engine.engine import Engine
from baton.worker.executors.base import Executor
from baton.worker.executors.cuda.draft_model import CudaDraftModel
from baton.worker.scheduling.settings import EngineSettings

pytestmark = pytest.mark.gpu

COUNT = 200
ROWS = 32


def engine(executor: Executor) -> Engine:
    return Engine(executor, EngineSettings(ROWS, 300, cache_outputs=False), epoch=1)


def storyteller(speculation: str = "", num_blocks: int = 2000) -> Executor:
    return executor_for(
        MODEL,
        dtype="bfloat16",
        batch_invariant=True,
        num_blocks=num_blocks,
        max_num_requests=4 * ROWS,
        speculative_config=speculation,
    )


@pytest.mark.parametrize("num_blocks", [2000, 80])
def test_a_model_guesses_itself_and_changes_no_bit(num_blocks: int) -> None:
    plain = run(engine(storyteller()), random_requests(COUNT, seed=3))
    settings = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 4}
    executor = storyteller(json.dumps(settings), num_blocks)
    verified = leader_of(executor).verified
    assert verified is not None
    assert isinstance(verified.speculator._proposer, CudaDraftModel)
    verify_always(verified)
    one = engine(executor)
    assert run(one, random_requests(COUNT, seed=3), seed=5) == plain
    counters = one.counters()
    assert counters.num_proposer_failures == 0
    assert counters.num_draft_tokens > 1000
    assert counters.num_accepted_tokens > 0.5 * counters.num_draft_tokens
    assert (counters.num_preemptions > 0) is (num_blocks < 1000)
