"""Submissions in a row that share their parameters are read as each alone."""

from __future__ import annotations

import itertools

import pytest

from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2, worker_pb2
from baton.worker.core import ModelSpec
from baton.worker.engine.submit import ParameterMemo, generation_of

MODEL = ModelSpec(bytes(16), 100, 1000, (2,))


def submit(seed: int | None, max_tokens: int = 4, **fields: object) -> worker_pb2.SubmitRequest:
    sampling = types_pb2.SamplingParams(
        temperature=1, top_p=1, top_k=0, min_p=0, presence_penalty=0, frequency_penalty=0, repetition_penalty=1
    )
    sampling.MergeFrom(types_pb2.SamplingParams(seed=seed, **fields))
    stop = types_pb2.StopConditions(max_tokens=max_tokens, stop_token_ids=[7])
    return worker_pb2.SubmitRequest(prompt_token_ids=[1, 2], sampling=sampling, stop=stop)


def test_equal_parameters_keep_their_own_seeds_and_ends() -> None:
    memo = ParameterMemo()
    kinds = itertools.product((1, 2), (4, 5), ({}, {"logprobs": 2}, {"prompt_logprobs": 1}))
    for seed, max_tokens, fields in kinds:
        for _ in range(2):
            found = generation_of(submit(seed, max_tokens, **fields), MODEL, "a", 0.0, memo=memo)
            alone = generation_of(submit(seed, max_tokens, **fields), MODEL, "a", 0.0)
            assert (found.sampling, found.stop) == (alone.sampling, alone.stop)
            assert found.sampling.seed == seed


def test_a_submission_without_a_seed_is_refused_also_in_a_row() -> None:
    memo = ParameterMemo()
    generation_of(submit(1), MODEL, "a", 0.0, memo=memo)
    with pytest.raises(InvalidRequest, match="seed is not set"):
        generation_of(submit(None), MODEL, "b", 0.0, memo=memo)
    with pytest.raises(InvalidRequest, match="temperature"):
        generation_of(submit(1, temperature=5.0), MODEL, "c", 0.0, memo=memo)
    assert generation_of(submit(3), MODEL, "d", 0.0, memo=memo).sampling.seed == 3
