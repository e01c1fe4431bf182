"""Log-probabilities of the CUDA executor, in Triton's interpreter, are those of the CPU executor."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine.interpreted_card import use_interpreted_card
from support.engine.step_harness import Running, StepHarness
from support.engine.tiny_models import VOCAB_SIZE, make_model

from baton.worker.config import WorkerConfig
from baton.worker.core import SamplingParams, TokenLogprobs
from baton.worker.executors.factory import make_executor

pytestmark = pytest.mark.interpreted

SAMPLING = [
    SamplingParams(temperature=0.7, top_k=5, seed=1, logprobs=3),
    SamplingParams(temperature=1.3, presence_penalty=0.7, seed=2, logprobs=2),
    SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=(3, 4)),
    SamplingParams(temperature=0.9, top_p=0.8, seed=3, logprobs=VOCAB_SIZE),
    SamplingParams(temperature=1.0, seed=4),
]


def run(folder: Path, executor: str) -> list[Running]:
    config = WorkerConfig(
        model=str(folder),
        executor=executor,
        dtype="float32",
        max_num_requests=8,
        num_blocks=32,
        cuda_graphs=False,
        logprobs_mode="processed_logprobs",
    )
    harness = StepHarness(make_executor(config))
    requests = [harness.admit([7, 8, 9, 10], sampling) for sampling in SAMPLING]
    harness.run(2)
    return requests


def test_processed_values_are_those_of_the_cpu_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", tmp_path)
    theirs = run(tmp_path, "cpu")
    use_interpreted_card(monkeypatch)
    for mine, other in zip(run(tmp_path, "cuda"), theirs, strict=True):
        assert mine.output == other.output
        assert len(mine.logprobs) == len(other.logprobs) == (0 if mine.sampling.logprobs is None else 2)
        for one, wanted in zip(mine.logprobs, other.logprobs, strict=True):
            check(one, wanted)


def check(found: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-3)
    assert found.top_logprobs == pytest.approx(wanted.top_logprobs, abs=1e-3)
    assert found.rank == wanted.rank
