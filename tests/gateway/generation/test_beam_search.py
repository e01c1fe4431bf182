"""Beam search: the same beams as a search over every continuation, whole requests, and what is refused."""

import itertools
import math

import pytest
from support.gateway.rest_harness import FakeGenerator, rest_side, say

from baton.gateway.core import TokenLogprob, TopLogprob
from baton.gateway.generation.beam_search import Beam, is_settled
from baton.rpc.errors import NoCapacity

VOCABULARY = (10, 11, 12, 13)


def next_logprobs(context):
    """A distribution over VOCABULARY that depends on the whole context."""
    weights = [1 + (sum(context) * 7 + token_id * (len(context) + 3)) % 11 for token_id in VOCABULARY]
    return {token_id: math.log(weight / sum(weights)) for token_id, weight in zip(VOCABULARY, weights, strict=True)}


def model(generation):
    """One token, with the likeliest ones."""
    request = generation.request
    assert (request.stop.max_tokens, request.n, request.sampling.temperature) == (1, 1, 0)
    ranked = sorted(next_logprobs(request.prompt_token_ids).items(), key=lambda item: -item[1])
    top = tuple(TopLogprob("", b"", token_id, value) for token_id, value in ranked[: request.sampling.logprobs])
    entry = TokenLogprob("", b"", ranked[0][0], ranked[0][1], 1, top)
    generation.emit("", token_ids=(ranked[0][0],), logprobs=[entry])
    generation.finish(reason="length")
    generation.done(1)


def best_of_all(prompt, length, count):
    """The most likely continuations among all of this length."""
    found = []
    for tokens in itertools.product(VOCABULARY, repeat=length):
        total = sum(next_logprobs([*prompt, *tokens[:at]])[token] for at, token in enumerate(tokens))
        found.append((total, list(tokens)))
    return [tokens for _, tokens in sorted(found, key=lambda item: -item[0])[:count]]


async def test_wide_enough_beams_find_the_likeliest_continuations():
    async with rest_side(model) as rest:
        answer = await rest.complete([5, 6], use_beam_search=True, n=8, max_tokens=3, return_token_ids=True)
        assert rest.admission.in_use == 0
    assert answer.status == 200
    assert [choice["token_ids"] for choice in answer.json["choices"]][:3] == best_of_all([5, 6], 3, 3)
    assert {choice["finish_reason"] for choice in answer.json["choices"]} == {"length"}
    assert answer.json["usage"]["completion_tokens"] == 24


async def test_one_beam_is_greedy():
    async with rest_side(model) as rest:
        answer = await rest.complete([5], use_beam_search=True, max_tokens=4, return_token_ids=True)
    context = [5]
    for _ in range(4):
        context.append(max(next_logprobs(context).items(), key=lambda item: item[1])[0])
    assert answer.json["choices"][0]["token_ids"] == context[1:]


async def test_a_beam_ends_with_a_stop_token():
    async with rest_side(model) as rest:
        answer = await rest.complete(
            [5], use_beam_search=True, n=2, max_tokens=6, stop_token_ids=list(VOCABULARY[:3]), return_token_ids=True
        )
    for choice in answer.json["choices"]:
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == choice["token_ids"][-1]
        assert not set(choice["token_ids"][:-1]) & set(VOCABULARY[:3])


async def test_chats_have_beams_too():
    async with rest_side(model) as rest:
        answer = await rest.chat(use_beam_search=True, n=2, max_tokens=2, length_penalty=0.5)
    assert len(answer.json["choices"]) == 2


async def test_a_refused_step_fails_the_search():
    generator = FakeGenerator(model)
    generator.refusal = NoCapacity("full")
    async with rest_side(generator=generator) as rest:
        answer = await rest.complete([5], use_beam_search=True, n=2)
        assert rest.admission.in_use == 0
    assert answer.status == 429


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 11}, "n"),
        ({"stream": True}, "stream"),
        ({"logprobs": 1}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"length_penalty": 99}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
    ],
)
async def test_fields_without_support_in_beam_search_are_refused_by_name(fields, param):
    async with rest_side(say("x")) as rest:
        answer = await rest.complete([5], **{"use_beam_search": True, **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_search_is_settled_when_nothing_can_overtake():
    ended = [Beam((1,), -1.0, ("stop", None)), Beam((2,), -2.0, ("stop", None))]
    assert is_settled([Beam((3,), -2.5)], ended, 2, 1.0)
    assert not is_settled([Beam((3,), -1.5)], ended, 2, 1.0)
    assert not is_settled([Beam((3,), -9.0)], ended[:1], 2, 1.0)
    assert is_settled([], ended[:1], 2, 1.0)


def test_a_beam_on_real_workers_is_the_greedy_answer(tandem_stack):
    body = {"prompt": "Once upon a time", "max_tokens": 12, "return_token_ids": True}
    (status, greedy), (_, one), (_, many) = (
        tandem_stack.post("/v1/completions", {**body, **fields})
        for fields in ({"temperature": 0}, {"use_beam_search": True}, {"use_beam_search": True, "n": 4})
    )
    assert status == 200, greedy
    assert one["choices"][0]["text"] == greedy["choices"][0]["text"]
    texts = [choice["text"] for choice in many["choices"]]
    assert len(set(texts)) == 4
