"""POST /generative_scoring over a scripted generator: what it generates, how errors and departures end it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.gateway.rest_harness import (
    FakeGeneration,
    FakeGenerator,
    RawClient,
    logprob,
    request_bytes,
    rest_side,
    until,
)
from support.gateway.vectors_rig import FakePooler

from baton.rpc.errors import NoCapacity

BODY: dict[str, Any] = {"query": "Is it a fish? ", "items": ["salmon", "stone"], "label_token_ids": [300, 301]}


def answer_with(*chances: float) -> Any:
    def script(generation: FakeGeneration) -> None:
        tops = [(str(index), math.log(chance)) for index, chance in enumerate(chances)]
        generation.emit("x", logprobs=(logprob("x", -1.0, *tops),))
        generation.finish(reason="length")
        generation.done(1)

    return script


@pytest.mark.parametrize(("softmax", "score"), [(True, 0.25), (False, 0.1)])
async def test_scores_are_of_one_token_after_each_item(softmax: bool, score: float) -> None:
    async with rest_side(answer_with(0.1, 0.3), pooler=FakePooler()) as rest:
        answer = await rest.post("/generative_scoring", {**BODY, "apply_softmax": softmax})
        assert [one["score"] for one in answer.json["data"]] == pytest.approx([score] * 2)
        assert answer.json["usage"]["total_tokens"] == answer.json["usage"]["prompt_tokens"] + 2
        encode = rest.catalog.get("").tokenizer.encode
        for item, started in zip(BODY["items"], rest.generator.started, strict=True):
            request = started.request
            assert list(request.prompt_token_ids) == encode(BODY["query"] + item, add_special_tokens=True)
            assert list(request.sampling.logprob_token_ids) == BODY["label_token_ids"]
            assert request.stop.max_tokens == 1


async def test_prompts_have_a_limit_together() -> None:
    async with rest_side(pooler=FakePooler()) as rest:
        answer = await rest.post("/generative_scoring", {**BODY, "query": [5] * 200, "items": [[5]] * 2000})
        assert (answer.status, answer.error["param"]) == (400, "items")
        assert "over 327680 tokens together" in answer.error["message"]
        assert not rest.generator.started
        assert rest.admission.in_use == 0


async def test_generations_of_a_client_that_left_are_aborted() -> None:
    generator = FakeGenerator()
    async with rest_side(generator=generator, pooler=FakePooler()) as rest:
        async with RawClient.connect(rest.port) as client:
            body = {**BODY, "items": ["a"] * 40}
            await client.send(request_bytes("POST", "/generative_scoring", body))
            await generator.next(31)
        await until(lambda: all(one.aborted.is_set() for one in generator.started) and not rest.admission.in_use)
        assert len(generator.started) == 32  # the others had not begun


async def test_an_error_of_one_item_ends_the_others() -> None:
    generator = FakeGenerator()
    async with rest_side(generator=generator, pooler=FakePooler()) as rest, RawClient.connect(rest.port) as client:
        await client.send(request_bytes("POST", "/generative_scoring", BODY))
        failing, other = await generator.next(0), await generator.next(1)
        failing.sink.on_error(NoCapacity("the fleet is full"))
        answer = await client.answer()
        assert (answer.status, answer.error["message"]) == (429, "the fleet is full")
        assert other.aborted.is_set()
        await until(lambda: not rest.admission.in_use)


async def test_an_aborted_request_ends_all_its_generations() -> None:
    generator = FakeGenerator()
    async with rest_side(generator=generator, pooler=FakePooler()) as rest, RawClient.connect(rest.port) as client:
        body = {**BODY, "items": ["a"] * 40, "request_id": "mine"}
        await client.send(request_bytes("POST", "/generative_scoring", body))
        await generator.next(31)
        ended = await rest.post("/abort_requests", {"request_ids": ["generative-scoring-mine"]})
        assert ended.json == {"num_aborted": 1}
        answer = await client.answer()
        assert (answer.status, answer.error["param"]) == (499, "request_id")
        await until(lambda: all(one.aborted.is_set() for one in generator.started) and not rest.admission.in_use)
        assert len(generator.started) == 32
