"""Embed, Score, Rerank, Classify and Pool: what REST answers, with its limits and errors, over a scripted pooler."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_status import rpc_status
from support.gateway.rest_harness import until
from support.gateway.vectors_rig import (
    CLASSIFIES,
    EMBEDS,
    SCORES_PAIRS,
    CountingGate,
    FakePooler,
    both_sides,
    vector_of,
)

from baton.gateway.models.tasks import WrongTask
from baton.rpc.errors import NoCapacity
from baton.v1 import inference_pb2 as pb
from baton.v1 import types_pb2, vectors_pb2
from baton.v1.inference_pb2_grpc import InferenceServiceStub

TEXTS = ["fox", "a river", "the ship"]
CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi")], omit_generation_prompt=True)
KEEP_START, KEEP_END, AVERAGE = (
    getattr(vectors_pb2, f"LONG_TEXTS_{name}") for name in ("KEEP_START", "KEEP_END", "AVERAGE")
)


def ids(*token_ids: int) -> pb.TokenIds:
    return pb.TokenIds(token_ids=token_ids)


def array(vectors: Any) -> np.ndarray:
    return np.array([list(one.values) for one in vectors], np.float32)


async def call(stub: InferenceServiceStub, method: str, **fields: Any) -> Any:
    """Returns the response; of a stream, all of them."""
    module = vectors_pb2 if method in ("Score", "Rerank") else pb
    sent = getattr(stub, method)(getattr(module, f"{method}Request")(**fields), timeout=20)
    return [one async for one in sent] if method in ("Embed", "Pool") else await sent


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("/v1/embeddings", {"input": TEXTS}, {"texts": TEXTS}),
        ("/v1/embeddings", {"input": [[5, 6], [7]]}, {"token_ids": [ids(5, 6), ids(7)]}),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "Hi"}]}, {"chat": CHAT}),
        ("/v1/embeddings", {"input": "fox", "task": "query"}, {"texts": ["fox"], "use": "query"}),
        (
            "/v1/embeddings",
            {"input": "fox " * 99, "truncate_prompt_tokens": -1},
            {"texts": ["fox " * 99], "options": {"long_texts": KEEP_START}},
        ),
        (
            "/v1/embeddings",
            {"input": "fox a river", "truncate_prompt_tokens": 3, "truncation_side": "left"},
            {"texts": ["fox a river"], "options": {"long_texts": KEEP_END, "max_tokens": 3}},
        ),
        (
            "/v1/embeddings",
            {"input": "fox " * 99, "enable_chunked_processing": True},
            {"texts": ["fox " * 99], "options": {"long_texts": AVERAGE}},
        ),
        (
            "/v1/embeddings",
            {"input": TEXTS, "use_activation": False, "add_special_tokens": False},
            {"texts": TEXTS, "options": {"raw": True, "omit_special_tokens": True}},
        ),
    ],
)
async def test_embeddings_are_those_of_rest(path: str, body: Any, fields: Any) -> None:
    pooler = FakePooler()
    async with both_sides(pooler, prompts={"query": "Q: "}) as (rest, stub):
        answer = (await rest.post(path, body)).json
        (response,) = await call(stub, "Embed", **fields)
        np.testing.assert_allclose(array(response.embeddings), [one["embedding"] for one in answer["data"]], rtol=1e-6)
        assert response.usage.prompt_tokens == answer["usage"]["prompt_tokens"]
        assert response.usage.cached_tokens == len(pooler.requests[1].texts)
        assert pooler.requests[0].texts == pooler.requests[1].texts
        assert pooler.requests[0].params == pooler.requests[1].params


@pytest.mark.parametrize("pools", [EMBEDS, SCORES_PAIRS], ids=["cosines", "pairs"])
async def test_scores_and_ranks_are_those_of_rest(pools: types_pb2.PoolerInfo) -> None:
    async with both_sides(FakePooler(pools.width), pools=pools) as (rest, stub):
        given: dict[str, Any] = {"queries": "fox", "documents": TEXTS}
        scores = [one["score"] for one in (await rest.post("/score", given)).json["data"]]
        one = await call(stub, "Score", queries=["fox"], documents=TEXTS)
        assert list(one.scores) == pytest.approx(scores)
        each = await call(stub, "Score", queries=["fox"] * 3, documents=TEXTS)
        assert list(each.scores) == pytest.approx(scores)
        given = {"query": "fox", "documents": TEXTS, "top_n": 2, "max_tokens_per_doc": 1}
        results = (await rest.post("/rerank", given)).json["results"]
        ranked = await call(stub, "Rerank", query="fox", documents=TEXTS, top_n=2, max_document_tokens=1)
        assert [one.index for one in ranked.results] == [one["index"] for one in results]
        assert [one.score for one in ranked.results] == pytest.approx([one["relevance_score"] for one in results])
        assert ranked.usage.prompt_tokens > 0


async def test_classes_and_vectors_of_tokens_are_those_of_rest() -> None:
    async with both_sides(FakePooler(3), pools=CLASSIFIES) as (rest, stub):
        expected = [one["probs"] for one in (await rest.post("/classify", {"input": TEXTS})).json["data"]]
        found = await call(stub, "Classify", texts=TEXTS)
        np.testing.assert_allclose(array(found.scores), expected, rtol=1e-6)
        assert list(found.labels) == ["a", "b", "c"]
        body = {"input": TEXTS, "task": "token_classify"}
        by_token = [one["data"] for one in (await rest.post("/pooling", body)).json["data"]]
        pooled = await call(stub, "Pool", texts=TEXTS, task=types_pb2.POOLING_TASK_TOKEN_CLASSIFY)
        assert [one.index for one in pooled] == [0, 1, 2]
        for one, vectors in zip(pooled, by_token, strict=True):
            np.testing.assert_allclose(array(one.vectors), vectors, rtol=1e-6)
        assert [one.HasField("usage") for one in pooled] == [False, False, True]
        default = await call(stub, "Pool", token_ids=[ids(5, 6)])  # the model's first task
        assert [len(one.vectors) for one in default] == [1]


async def test_large_answers_come_in_responses_that_any_client_takes() -> None:
    async with both_sides(FakePooler(1024), max_model_len=2048) as (_, stub):
        responses = await call(stub, "Embed", token_ids=[ids(5 + number) for number in range(2048)])
        assert len(responses) >= 8
        assert all(one.ByteSize() < (1 << 20) + (64 << 10) for one in responses)
        found = np.concatenate([array(one.embeddings) for one in responses])
        assert found.shape == (2048, 1024)
        np.testing.assert_array_equal(found[700], vector_of([705], 1024))
        assert [one.HasField("usage") for one in responses] == [False] * (len(responses) - 1) + [True]
        task = types_pb2.POOLING_TASK_TOKEN_EMBED
        responses = await call(stub, "Pool", token_ids=[ids(*[5] * 400), ids(6)], task=task)
        assert [one.index for one in responses] == [0, 0, 1]
        assert [len(one.vectors) for one in responses] == [256, 144, 1]


_ONE_OF = "give one of texts, token_ids and chat"


@pytest.mark.parametrize(
    ("method", "fields", "message", "field"),
    [
        ("Embed", {}, _ONE_OF, "texts"),
        ("Embed", {"texts": ["a"], "chat": CHAT}, _ONE_OF, "texts"),
        ("Embed", {"texts": ["a", ""]}, "texts.1 is empty", "texts.1"),
        ("Embed", {"texts": ["a"] * 2049}, "texts has 2049 texts; give 1 to 2048", "texts"),
        ("Embed", {"texts": ["a", "fox " * 99]}, "maximum context length is 64 tokens", "texts.1"),
        ("Embed", {"token_ids": [ids(5), ids()]}, "token_ids.1 is empty", "token_ids.1"),
        ("Embed", {"token_ids": [ids(5), ids(9999)]}, "9999", "token_ids.1"),
        ("Embed", {"chat": pb.ChatPrompt(messages=[pb.ChatMessage()])}, "has no role", "chat.messages.0.role"),
        ("Embed", {"texts": ["a"], "dimensions": 7}, "cannot be cut", "dimensions"),
        ("Embed", {"texts": ["a"], "use": "sts"}, "this model has prompts for query", "use"),
        ("Embed", {"token_ids": [ids(5)], "use": "query"}, "use is for texts", "use"),
        ("Embed", {"texts": ["a"], "model": "other"}, "does not exist", "model"),
        ("Embed", {"texts": ["a"], "options": {"long_texts": 9}}, "long_texts 9 is unknown", "options.long_texts"),
        ("Embed", {"texts": ["a"], "options": {"max_tokens": 3}}, "KEEP_START and KEEP_END", "options.max_tokens"),
        (
            "Embed",
            {"texts": ["a"], "options": {"max_tokens": 65, "long_texts": KEEP_END}},
            "give 0 to 64",
            "options.max_tokens",
        ),
        ("Embed", {"texts": ["a"], "options": {"request_id": "a b"}}, "invalid request_id", "options.request_id"),
        ("Score", {"queries": ["a"]}, "documents has 0 texts", "documents"),
        ("Score", {"queries": ["a"] * 2, "documents": ["a"]}, "give one of queries", "queries"),
        ("Score", {"queries": ["a"], "documents": ["b", ""]}, "documents.1 is empty", "documents.1"),
        (
            "Score",
            {"queries": ["a"], "documents": ["b"], "options": {"long_texts": AVERAGE}},
            "AVERAGE is for embeddings",
            "options.long_texts",
        ),
        ("Rerank", {"documents": ["b"]}, "query is empty", "query"),
        ("Rerank", {"query": "a"}, "documents has 0 texts", "documents"),
        ("Classify", {"texts": ["a"]}, "has no task classify; use Embed or Pool for it", "model"),
        ("Pool", {"texts": ["a"], "task": 9}, "task 9 is unknown", "task"),
        ("Pool", {"texts": ["a"], "task": 4}, "has no task token_classify; use Embed or Pool", "model"),
    ],
)
async def test_bad_input_names_the_field(method: str, fields: Any, message: str, field: str) -> None:
    async with both_sides(FakePooler(), prompts={"query": "Q: "}) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(stub, method, **fields)
        code = (
            grpc.StatusCode.NOT_FOUND if field == "model" and "exist" in message else grpc.StatusCode.INVALID_ARGUMENT
        )
        assert caught.value.code() is code
        assert message in str(caught.value.details())
        status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
        detail = types_pb2.ErrorDetail()
        assert any(one.Unpack(detail) for one in status.details)
        assert detail.field == field


async def test_a_wrong_task_names_the_method_to_use() -> None:
    async with both_sides(FakePooler()) as (rest, stub):
        rest.generator.refusal = WrongTask("the model generates no tokens", rest.catalog.get("").require_info())
        with pytest.raises(grpc.aio.AioRpcError, match="use Embed or Pool for it"):
            await stub.Generate(pb.GenerateRequest(text="Hi"), timeout=20).read()
    async with both_sides(FakePooler(), pools=None) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError, match="use Generate for it"):
            await call(stub, "Embed", texts=["a"])


async def test_tenants_limits_apply_and_their_requests_are_kept_apart() -> None:
    gate, pooler = CountingGate(), FakePooler()
    async with both_sides(pooler, gate) as (rest, stub):
        sent = stub.Score(vectors_pb2.ScoreRequest(queries=["fox"], documents=TEXTS), timeout=20)
        usage = (await sent).usage
        assert dict(await sent.initial_metadata())["x-ratelimit-remaining-requests"] == "9"
        await until(lambda: gate.used)
        assert [one.input_tokens for one in gate.costs] == [usage.prompt_tokens]
        assert [one.input_tokens for one in gate.used] == [usage.prompt_tokens]
        assert (pooler.requests[0].tenant, pooler.requests[0].tenant_salt) == ("acme", "grains")
        gate.refusal = NoCapacity("60 requests a minute are used up", retry_after_ms=500)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(stub, "Embed", texts=["a"])
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: not rest.admission.in_use)


async def test_calls_count_as_running_requests_until_they_end_or_are_cancelled() -> None:
    pooler = FakePooler()
    pooler.hold = asyncio.Event()
    async with both_sides(pooler, max_streams=1) as (rest, stub):
        first = stub.Embed(pb.EmbedRequest(texts=["a"], options={"request_id": "mine"}), timeout=60)
        reading = asyncio.ensure_future(first.read())
        await until(lambda: pooler.requests)
        assert pooler.requests[0].request_id == "mine"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(stub, "Classify", texts=["a"])
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # found before admission
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(stub, "Score", queries=["a"], documents=["b"])
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        await asyncio.wait([reading])
        await until(lambda: pooler.num_cancelled == 1 and not rest.admission.in_use)
        pooler.hold = None
        (response,) = await call(stub, "Embed", texts=["a"])
        assert response.request_id.startswith("embed-")


async def test_an_aborted_call_ends_as_cancelled_and_its_work_with_it() -> None:
    pooler = FakePooler()
    pooler.hold = asyncio.Event()
    async with both_sides(pooler) as (rest, stub):
        first = stub.Embed(pb.EmbedRequest(texts=["a"], options={"request_id": "mine"}), timeout=60)
        reading = asyncio.ensure_future(first.read())
        await until(lambda: pooler.requests)
        for name, num_aborted in (("other", 0), ("mine", 1)):
            assert (await stub.Abort(pb.AbortRequest(request_ids=[name]), timeout=20)).num_aborted == num_aborted
        with pytest.raises(grpc.aio.AioRpcError, match="the request mine was ended") as caught:
            await reading
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        await until(lambda: pooler.num_cancelled == 1 and not rest.admission.in_use)
