"""What --logprobs-mode gives, compared with Transformers' logits processors."""

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from baton.rpc.errors import InvalidRequest
from baton.worker.config import WorkerConfig
from baton.worker.core import ReasoningLimit, Row, RowInit, SamplingParams
from baton.worker.sampling.logprobs_mode import MODES, LogprobsMode
from baton.worker.sampling.sampler import Sampler

VOCAB = 300
PROMPT = np.array([3, 8, 8, 250], np.int32)
REQUESTS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 7},
    {"temperature": 0.9, "top_p": 0.6},
    {"temperature": 1.1, "min_p": 0.2, "repetition_penalty": 1.4},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "repetition_penalty": 0.7},
]


def theirs(logits, temperature, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0):
    """What Transformers draws from."""
    steps = LogitsProcessorList()
    if repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    if temperature:
        steps.append(TemperatureLogitsWarper(temperature))
        if top_k:
            steps.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            steps.append(TopPLogitsWarper(top_p))
        if min_p:
            steps.append(MinPLogitsWarper(min_p))
    return steps(torch.from_numpy(PROMPT.astype(np.int64))[None], logits[None].clone())[0]


@pytest.mark.parametrize("mode", LogprobsMode, ids=MODES)
def test_values_are_those_of_transformers(mode):
    logits = torch.randn(len(REQUESTS), VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    sampler = Sampler(len(REQUESTS), VOCAB, mode)
    for row, fields in enumerate(REQUESTS):
        sampler.admit(RowInit(Row(row), PROMPT, len(PROMPT), SamplingParams(seed=row, logprobs=VOCAB, **fields)))
    rows = np.arange(len(REQUESTS))
    token_ids, found = sampler.sample(logits.clone(), rows, np.zeros(len(rows), np.int64))
    for row, fields in enumerate(REQUESTS):
        expected = theirs(logits[row], **fields) if mode.is_processed else logits[row]
        if mode.is_normalized:
            expected = expected.log_softmax(-1)
        entry = found[row]
        given = torch.empty(VOCAB)
        given[torch.tensor(entry.top_token_ids)] = torch.tensor(entry.top_logprobs)
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
        assert entry.logprob == pytest.approx(float(expected[token_ids[row]]), abs=1e-5)
        assert entry.rank == int((expected > expected[token_ids[row]]).sum()) + 1


def test_a_forced_token_keeps_its_logit():
    sampler = Sampler(1, VOCAB, LogprobsMode.PROCESSED_LOGITS)
    sampling = SamplingParams(temperature=0.0, logprobs=0, reasoning_limit=ReasoningLimit(0, (9,)))
    sampler.admit(RowInit(Row(0), PROMPT, len(PROMPT), sampling))
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    token_ids, found = sampler.sample(logits.clone(), np.arange(1), np.zeros(1, np.int64))
    assert token_ids.tolist() == [9]
    assert found[0].logprob == pytest.approx(float(logits[0, 9]))


@pytest.mark.parametrize("mode", LogprobsMode, ids=MODES)
def test_named_tokens_and_drawn_ones_do_not_depend_on_the_mode(mode):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(6))
    chosen = (299, 0, 17)
    sampling = SamplingParams(temperature=1.3, top_k=50, seed=9, logprobs=0, logprob_token_ids=chosen)
    drawn = []
    for each in (LogprobsMode.RAW_LOGPROBS, mode):
        sampler = Sampler(1, VOCAB, each)
        sampler.admit(RowInit(Row(0), PROMPT, len(PROMPT), sampling))
        token_ids, found = sampler.sample(logits.clone(), np.arange(1), np.zeros(1, np.int64))
        drawn.append(token_ids.tolist())
    assert drawn[0] == drawn[1]
    expected = theirs(logits[0], 1.3, top_k=50) if mode.is_processed else logits[0]
    expected = expected.log_softmax(-1) if mode.is_normalized else expected
    assert found[0].top_token_ids == chosen
    assert found[0].top_logprobs == pytest.approx([float(expected[one]) for one in chosen], abs=1e-5)


def test_the_simulator_refuses_other_modes_by_name():
    WorkerConfig(executor="sim", logprobs_mode="raw_logprobs").validate()
    for executor in ("cpu", "cuda"):
        WorkerConfig(executor=executor, logprobs_mode="raw_logits").validate()
    with pytest.raises(InvalidRequest, match="logprobs_mode=raw_logits needs executor=cpu or cuda") as refused:
        WorkerConfig(executor="sim", logprobs_mode="raw_logits").validate()
    assert refused.value.field == "logprobs_mode"
