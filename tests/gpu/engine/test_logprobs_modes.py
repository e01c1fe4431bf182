"""Log-probabilities of the CUDA executor are those of the CPU executor in every mode, with and without graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine.gpu_engines import engine_over, executor_for, generate, make_model, make_prompts, tokens_of

from baton.worker.core import SamplingParams

pytestmark = pytest.mark.gpu

SAMPLING = [
    SamplingParams(temperature=0.7, top_k=20, seed=1, logprobs=5),
    SamplingParams(temperature=1.0, top_p=0.9, seed=2, logprobs=100),
    SamplingParams(temperature=1.2, min_p=0.02, seed=3, logprobs=3),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=2),
    SamplingParams(temperature=0.8, presence_penalty=1.0, frequency_penalty=0.4, seed=4, logprobs=4),
    SamplingParams(temperature=1.0, seed=5, logprobs=0, logprob_token_ids=(1, 2, 900)),
    SamplingParams(temperature=1.0, allowed_token_ids=(5, 6, 7, 8), seed=6, logprobs=6),
    SamplingParams(temperature=1.0, seed=7),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_model("llama-128", folder)
    return folder


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "processed_logprobs"])
def test_values_are_those_of_the_cpu_executor(folder: Path, mode: str, cuda_graphs: bool) -> None:
    prompts = make_prompts(seed=3)[: len(SAMPLING)]
    ours = generate(
        engine_over(executor_for(folder, logprobs_mode=mode, cuda_graphs=cuda_graphs)), prompts, 8, SAMPLING
    )
    theirs = generate(engine_over(executor_for(folder, executor="cpu", logprobs_mode=mode)), prompts, 8, SAMPLING)
    assert tokens_of(ours) == tokens_of(theirs)
    num_compared = 0
    for one, other in zip(ours, theirs, strict=True):
        for mine, yours in zip(one.logprobs, other.logprobs, strict=True):
            num_compared += 1
            assert mine.logprob == pytest.approx(yours.logprob, abs=1e-3)
            assert mine.top_logprobs == pytest.approx(yours.top_logprobs, abs=1e-3)
            assert mine.rank == yours.rank
    assert num_compared == 8 * (len(SAMPLING) - 1)
