"""Parameters that requests in a row share are read once, and resolve as those of each request alone."""

from __future__ import annotations

import dataclasses
import random

import pytest

from baton.gateway.core import GenerationRequest
from baton.gateway.models.sampling import RequestLimits, Resolver, SamplingDefaults, resolve
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

INFO = types_pb2.ModelInfo(vocab_size=100, max_model_len=64, eos_token_ids=[2])
OTHER = types_pb2.ModelInfo(vocab_size=50, max_model_len=64, eos_token_ids=[3])
DEFAULTS = SamplingDefaults.from_config({"temperature": 0.5}, "a file")
LIMITS = RequestLimits()
CHOICES = (
    {},
    {"temperature": 0.0},
    {"logprobs": 3},
    {"logit_bias_token_ids": [60], "logit_bias_values": [1.0]},
    {"bad_words": ["bad"]},
)
STOPS = ({}, {"max_tokens": 8}, {"max_tokens": 60}, {"stop": ["a"], "max_tokens": 8}, {"min_tokens": 5})


def request(source: random.Random) -> GenerationRequest:
    fields, stop = source.choice(CHOICES), source.choice(STOPS)
    if source.random() < 0.5:
        fields = {**fields, "seed": source.getrandbits(64)}
    return GenerationRequest(
        request_id="r",
        model="m",
        prompt_token_ids=[5] * source.randint(1, 62),
        sampling=types_pb2.SamplingParams(**fields),
        stop=types_pb2.StopConditions(**stop),
        seed=source.choice((None, 7)),
    )


def outcome(resolved: object) -> object:
    try:
        return resolved()
    except InvalidRequest as error:
        return error.message


def test_requests_in_a_row_resolve_as_each_alone() -> None:
    source = random.Random(0)
    resolver = Resolver(LIMITS)
    for number in range(400):
        one, info = request(source), source.choice((INFO, OTHER))
        random.seed(number)
        alone = outcome(lambda one=one, info=info: resolve(one, DEFAULTS, info, LIMITS))
        random.seed(number)
        in_a_row = outcome(lambda one=one, info=info: resolver.resolve(one, DEFAULTS, info))
        assert in_a_row == alone
        repeated = dataclasses.replace(one, seed=9)
        again = outcome(lambda one=repeated, info=info: resolver.resolve(one, DEFAULTS, info))
        assert isinstance(again, str) or again.seed == 9


def test_a_request_that_is_wrong_stays_wrong() -> None:
    resolver = Resolver(LIMITS)
    wrong = GenerationRequest("r", "m", [5], types_pb2.SamplingParams(temperature=3.0))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="temperature"):
            resolver.resolve(wrong, DEFAULTS, INFO)
    right = dataclasses.replace(wrong, sampling=types_pb2.SamplingParams(temperature=1.0))
    assert resolver.resolve(right, DEFAULTS, INFO).sampling.temperature == 1.0
    with pytest.raises(InvalidRequest, match="temperature"):
        resolver.resolve(wrong, DEFAULTS, INFO)


def test_the_context_limits_each_prompt_by_itself() -> None:
    resolver = Resolver(LIMITS)
    asked = GenerationRequest("r", "m", [5] * 10, stop=types_pb2.StopConditions(max_tokens=50))
    lengths = [
        resolver.resolve(dataclasses.replace(asked, prompt_token_ids=[5] * length), DEFAULTS, INFO).stop.max_tokens
        for length in (10, 14, 60, 10)
    ]
    assert lengths == [50, 50, 4, 50]
