"""Log-probabilities of prompts: those of Transformers, whatever the chunks, the cache and the preemptions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.engine_harness import make_executor
from support.engine.tiny_models import load_transformers

from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2, worker_pb2
from baton.worker.config import WorkerConfig
from baton.worker.core import ModelSpec, Request, SamplingParams, StopConditions, TokenLogprobs
from baton.worker.engine.engine import Engine
from baton.worker.engine.submit import generation_of
from baton.worker.executors.cpu.executor import CpuExecutor
from baton.worker.scheduling.settings import EngineSettings

SAMPLE_MODEL = Path(__file__).resolve().parents[3] / "models" / "storyteller-7m"
PROMPT = [1, *range(40, 77)]
MODEL = ModelSpec(bytes(16), 100, 1000, (2,))


def make_engine(num_blocks: int = 100, budget: int = 512) -> Engine:
    config = WorkerConfig(model=str(SAMPLE_MODEL), threads=1, block_size=8, num_blocks=num_blocks, max_num_requests=8)
    return Engine(CpuExecutor(config), EngineSettings(max_num_requests=8, max_num_batched_tokens=budget), epoch=1)


def make_request(name: str, prompt: list[int], num_top: int | None, max_tokens: int = 2) -> Request:
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=num_top)
    return Request(name, list(prompt), len(prompt), sampling, StopConditions(max_tokens=max_tokens), bytes(16))


def run(engine: Engine, *requests: Request) -> dict[str, dict[int, TokenLogprobs]]:
    """Returns log-probabilities of each prompt by position. Repeated ones must be equal, and none follows a token."""
    found: dict[str, dict[int, TokenLogprobs]] = {request.request_id: {} for request in requests}
    for request in requests:
        engine.submit(request)
    num_left = len(requests)
    while num_left:
        outputs = engine.step()
        assert not outputs.failures
        for request, first, entries in outputs.prompt_logprobs:
            for place, entry in enumerate(entries, first):
                known = found[request.request_id].setdefault(place, entry)
                assert known.logprob == pytest.approx(entry.logprob, abs=1e-4)
        num_left -= len(outputs.finishes)
    engine.audit()
    return found


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """Returns log-probabilities [len(PROMPT) - 1, vocab_size] of the token after each token but the last."""
    model = load_transformers(SAMPLE_MODEL)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0, :-1].float().log_softmax(-1)


def check(found: dict[int, TokenLogprobs], expected: torch.Tensor, num_top: int) -> None:
    assert sorted(found) == list(range(1, len(PROMPT)))
    for place, entry in found.items():
        row = expected[place - 1]
        assert entry.logprob == pytest.approx(row[PROMPT[place]].item(), abs=1e-3)
        assert entry.rank == int((row > row[PROMPT[place]]).sum()) + 1
        assert entry.top_logprobs == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-3)


@pytest.mark.parametrize("budget", [512, 11])
def test_they_are_the_models_own_in_chunks_of_any_size(budget: int, expected: torch.Tensor) -> None:
    found = run(make_engine(budget=budget), make_request("a", PROMPT, 3), make_request("b", PROMPT[:9], None))
    check(found["a"], expected, 3)
    assert found["b"] == {}


def test_a_cached_prompt_is_computed_again_for_logprobs(expected: torch.Tensor) -> None:
    engine = make_engine()
    run(engine, make_request("first", PROMPT, None))
    found = run(engine, make_request("again", PROMPT, 0), make_request("beside", PROMPT, 1))
    check(found["again"], expected, 0)
    check(found["beside"], expected, 1)


def test_a_preempted_request_has_the_same_prompt_logprobs(expected: torch.Tensor) -> None:
    engine = make_engine(num_blocks=14)
    requests = [make_request(str(index), PROMPT, 1, max_tokens=30) for index in range(3)]
    found = run(engine, *requests)
    for request in requests:
        check(found[request.request_id], expected, 1)


def submit(**fields: object) -> worker_pb2.SubmitRequest:
    sampling = types_pb2.SamplingParams(
        temperature=1, top_p=1, top_k=0, min_p=0, seed=1, presence_penalty=0, frequency_penalty=0, repetition_penalty=1
    )
    sampling.MergeFrom(types_pb2.SamplingParams(**fields))
    stop = types_pb2.StopConditions(max_tokens=1)
    prefill = types_pb2.Endpoint(worker_id="p")
    return worker_pb2.SubmitRequest(prompt_token_ids=[1, 2], sampling=sampling, stop=stop, prefill=prefill)


def test_requests_with_prompt_logprobs_compute_their_prompt() -> None:
    asking = generation_of(submit(prompt_logprobs=4), MODEL, "a", 0.0)
    other = generation_of(submit(), MODEL, "b", 0.0)
    assert (asking.sampling.prompt_logprobs, asking.remote_prefill) == (4, False)
    assert (other.sampling.prompt_logprobs, other.remote_prefill) == (None, True)


def test_too_many_alternatives_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        generation_of(submit(prompt_logprobs=1025), MODEL, "a", 0.0)
    assert caught.value.field == "sampling.prompt_logprobs"


def test_simulated_ones_are_the_same_however_the_prompt_is_cut() -> None:
    found = []
    for budget, num_blocks in ((512, 64), (7, 24)):
        engine = Engine(make_executor(num_blocks=num_blocks), EngineSettings(4, budget), epoch=1)
        requests = [make_request(str(index), PROMPT, 2, max_tokens=20) for index in range(2)]
        found.append(run(engine, *requests, make_request("other", PROMPT, None)))
    whole, cut = found
    assert whole == cut
    assert sorted(whole["0"]) == list(range(1, len(PROMPT)))
    assert all(len(entry.top_token_ids) == 2 for entry in whole["0"].values())
    assert whole["other"] == {}
