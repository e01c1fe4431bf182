"""Speculation of the CUDA executor, in Triton's interpreter, changes no token and no log-probability."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.engine.answer_proposer import draft_from
from support.engine.interpreted_card import use_interpreted_card
from support.engine.tiny_models import VOCAB_SIZE, make_model

from baton.worker.config import WorkerConfig
from baton.worker.core import Request, SamplingParams, StopConditions, TokenLogprobs
from baton.worker.engine.engine import Engine
from baton.worker.executors.cuda.executor import CudaExecutor
from baton.worker.executors.factory import make_executor
from baton.worker.executors.ranks import RankGroup
from baton.worker.scheduling.settings import EngineSettings

pytestmark = pytest.mark.interpreted

SAMPLING = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.3, seed=2, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.8, seed=3, logprobs=1),
    SamplingParams(temperature=1.0, presence_penalty=0.7, seed=4),
    SamplingParams(
        temperature=0.8, min_tokens=5, suppressed_token_ids=(1, 2, 3), forbidden_sequences=((4, 5),), seed=6
    ),
]
COUNT = 9
Found = dict[str, list[tuple[int, TokenLogprobs | None]]]


def make_engine(folder: Path, speculation: str) -> tuple[Engine, CudaExecutor]:
    config = WorkerConfig(
        model=str(folder),
        executor="cuda",
        dtype="float32",
        max_num_requests=len(SAMPLING),
        num_blocks=32,
        cuda_graphs=False,
        batch_invariant=True,
        speculative_config=speculation,
    )
    executor = make_executor(config)
    assert isinstance(executor, RankGroup)
    assert isinstance(executor.leader, CudaExecutor)
    return Engine(executor, EngineSettings(len(SAMPLING), 64, cache_outputs=False), epoch=1), executor.leader


def prompt_of(index: int) -> list[int]:
    return [7, 8, 9, 10 + index]


def run(engine: Engine) -> Found:
    for index, sampling in enumerate(SAMPLING):
        prompt = prompt_of(index)
        stop = StopConditions(COUNT - index, min_tokens=min(sampling.min_tokens, COUNT - index))
        engine.submit(Request(str(index), prompt, len(prompt), sampling, stop, bytes(16)))
    found: Found = {str(index): [] for index in range(len(SAMPLING))}
    while engine.has_work():
        outputs = engine.step()
        assert not outputs.failures, outputs.failures
        for request, token_id, logprobs in outputs.tokens():
            found[request.request_id].append((token_id, logprobs))
    engine.audit()
    return found


def test_right_and_wrong_drafts_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", tmp_path)
    use_interpreted_card(monkeypatch)
    plain = run(make_engine(tmp_path, "")[0])
    engine, executor = make_engine(tmp_path, json.dumps({"num_speculative_tokens": 3}))
    assert executor.depth == 2, "steps are in flight when drafts are proposed"
    assert executor.verified is not None
    answers = {
        np.array(prompt_of(index), np.int32).tobytes(): [token_id for token_id, _ in plain[str(index)]]
        for index in range(len(SAMPLING))
    }
    draft_from(executor.verified.speculator, answers, 0.2, VOCAB_SIZE)
    assert run(engine) == plain
    counters = engine.counters()
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
