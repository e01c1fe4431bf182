"""Forbidden sequences, limits of reasoning and chosen log-probabilities between workers, and after a failover."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.processes.worker_harness import Worker, endpoint, running_pair, running_worker, sampling, submit

from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2
from baton.worker.core import ModelSpec, ReasoningLimit
from baton.worker.engine.submit import generation_of, prefill_of
from baton.worker.handover.messages import prefill_submit

MODEL = Path(__file__).resolve().parents[3] / "models" / "storyteller-7m"
SPEC = ModelSpec(bytes(16), 1000, 1000, (2,))
PROMPT = [5 + index * 7 % 900 for index in range(150)]
COUNT = 12


def sequence(*token_ids: int) -> types_pb2.TokenSequence:
    return types_pb2.TokenSequence(token_ids=token_ids)


async def tokens_of(worker: Worker, wishes: list[dict[str, Any]], **fields: object) -> list[list[int]]:
    asked = [
        submit(slot, PROMPT, max_tokens=COUNT, sampling=sampling(temperature=0.0, **wish), **fields)
        for slot, wish in enumerate(wishes)
    ]
    slots = await worker.stream().generate(*asked)
    assert [slot.failure for slot in slots] == [None] * len(slots)
    for slot, wish in zip(slots, wishes, strict=True):
        wanted = list(wish.get("logprob_token_ids", ()))
        assert all(list(entry.top_token_ids) == wanted for entry in slot.logprobs)
        assert len(slot.logprobs) == (COUNT if wanted else 0)
    return [slot.tokens for slot in slots]


@pytest.mark.parametrize(
    "executor", [{}, {"executor": "cpu", "model": str(MODEL), "threads": 1, "engine_process": True}]
)
async def test_a_pair_keeps_to_them_from_the_first_token_on(executor: dict[str, Any], free_port: int) -> None:
    async with running_worker(free_port, **executor) as both:
        ((first, second, *_),) = [free] = await tokens_of(both, [{}])
        wishes: list[dict[str, Any]] = [
            {"forbidden_sequences": [sequence(first)]},
            {"forbidden_sequences": [sequence(first, second), sequence(*free[4:7])]},
            {"reasoning_limit": types_pb2.ReasoningLimit(max_tokens=0, end_token_ids=[8, 9])},
            {"reasoning_limit": types_pb2.ReasoningLimit(max_tokens=3, end_token_ids=[9], start_token_id=first)},
            {"logprobs": 0, "logprob_token_ids": [9, 5, 9]},
        ]
        alone = await tokens_of(both, wishes)
        resumed = [{**wish, "logprobs": None, "logprob_token_ids": []} for wish in wishes]
        for wish, tokens in zip(resumed, alone, strict=True):
            resume = {"output_token_ids": tokens[:5]}
            assert await tokens_of(both, [wish], resume=resume) == [tokens[5:]]
    async with running_pair(**executor) as (prefill, decode):
        assert await tokens_of(decode, wishes, prefill=endpoint(prefill)) == alone
        stats = await decode.until_idle()
        assert stats.counters.num_transfers >= 1
    assert first not in alone[0]
    assert (alone[1][0], alone[1][1]) != (first, second)
    assert alone[2][:2] == [8, 9]
    assert alone[3][:5] == [*free[:4], 9]
    assert alone[4] == free


def test_a_prefill_worker_gets_the_whole_request() -> None:
    asked = submit(
        0,
        PROMPT,
        sampling=sampling(
            forbidden_sequences=[sequence(7, 8), sequence(9)],
            logprobs=0,
            logprob_token_ids=[5, 6],
            reasoning_limit=types_pb2.ReasoningLimit(max_tokens=4, end_token_ids=[3], start_token_id=0),
        ),
        tenant="acme",
    )
    request = generation_of(asked, SPEC, "a", 0.0)
    told = prefill_of(prefill_submit(request, 1, 0, len(PROMPT), 0.0), SPEC, "b", 0.0)
    assert told.sampling == request.sampling
    assert told.sampling.forbidden_sequences == ((7, 8), (9,))
    assert told.sampling.reasoning_limit == ReasoningLimit(4, (3,), 0)
    assert told.tenant == request.tenant == "acme"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"forbidden_sequences": [sequence()]}, "sampling.forbidden_sequences"),
        ({"forbidden_sequences": [sequence(1000)]}, "sampling.forbidden_sequences"),
        ({"forbidden_sequences": [sequence(*[5] * 65)]}, "sampling.forbidden_sequences"),
        ({"forbidden_sequences": [sequence(5)] * 4097}, "sampling.forbidden_sequences"),
        ({"logprob_token_ids": [5]}, "sampling.logprob_token_ids"),
        ({"logprobs": 0, "logprob_token_ids": [1000]}, "sampling.logprob_token_ids"),
        ({"logprobs": 0, "logprob_token_ids": [5] * 1025}, "sampling.logprob_token_ids"),
        ({"reasoning_limit": types_pb2.ReasoningLimit()}, "sampling.reasoning_limit.end_token_ids"),
        (
            {"reasoning_limit": types_pb2.ReasoningLimit(end_token_ids=[1000])},
            "sampling.reasoning_limit.end_token_ids",
        ),
    ],
)
def test_invalid_rules_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generation_of(submit(0, PROMPT, sampling=sampling(**fields)), SPEC, "a", 0.0)
    assert caught.value.field == field
