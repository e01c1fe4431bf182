"""The routes for vectors over a scripted pooler: prompts, fields of other vendors, limits, clients that leave."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import pytest
from support.gateway.rest_harness import RawClient, Rest, request_bytes, until
from support.gateway.vectors_rig import EMBEDS_TOKENS, WIDTH, FakePooler, vector_of, vectors_side
from support.processes.cpu_seconds import cheapest_of

PROMPTS = {"query": "Instruct: find.\nQuery: ", "document": "passage: ", "sts": "sts: "}


def encode(rest: Rest, text: str) -> list[int]:
    return rest.catalog.get("").tokenizer.encode(text, add_special_tokens=True)


@pytest.mark.parametrize(
    ("path", "body", "prompts"),
    [
        ("/v1/embeddings", {"input": ["fox"]}, [""]),
        ("/v1/embeddings", {"input": "fox", "task": "retrieval.query"}, [PROMPTS["query"]]),
        ("/v1/embeddings", {"input": "fox", "task": "text-matching"}, [PROMPTS["sts"]]),
        ("/v1/embeddings", {"input": ["fox"], "task": "document"}, [PROMPTS["document"]]),
        ("/v2/embed", {"texts": ["fox"], "input_type": "search_query"}, [PROMPTS["query"]]),
        ("/v2/embed", {"texts": ["fox"], "input_type": "search_document"}, [PROMPTS["document"]]),
        ("/score", {"queries": "fox", "documents": ["fox", "fox"]}, [PROMPTS["query"], *[PROMPTS["document"]] * 2]),
        ("/rerank", {"query": "fox", "documents": ["fox"]}, [PROMPTS["query"], PROMPTS["document"]]),
    ],
)
async def test_texts_have_the_prompt_of_their_use(path: str, body: Any, prompts: list[str]) -> None:
    pooler = FakePooler()
    async with vectors_side(pooler, PROMPTS) as rest:
        answer = await rest.post(path, body)
        assert answer.status == 200, answer.body
        assert list(pooler.requests[0].texts) == [encode(rest, prompt + "fox") for prompt in prompts]


async def test_other_texts_have_the_default_prompt_and_token_ids_none() -> None:
    pooler = FakePooler()
    async with vectors_side(pooler, PROMPTS, PROMPTS["sts"]) as rest:
        for given in ("fox", [300, 301]):
            assert (await rest.post("/v1/embeddings", {"input": given})).status == 200
        assert [list(one.texts) for one in pooler.requests] == [[encode(rest, "sts: fox")], [[300, 301]]]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "a", "task": "classification"}, "task"),
        ("/v2/embed", {"texts": ["a"], "input_type": "classification"}, "input_type"),
    ],
)
async def test_a_use_without_a_prompt_is_refused_unless_the_model_has_none(path: str, body: Any, param: str) -> None:
    async with vectors_side(FakePooler(), PROMPTS) as rest:
        error = (await rest.post(path, body)).error
        assert error["message"] == f"{param} is 'classification'; this model has prompts for query, document, sts"
        assert error["param"] == param
    async with vectors_side(FakePooler()) as rest:
        assert (await rest.post(path, body)).status == 200


async def test_fields_of_jina_mean_what_others_mean() -> None:
    pooler = FakePooler()
    async with vectors_side(pooler) as rest:
        vector = vector_of(encode(rest, "fox"))
        found = {
            kind: (await rest.post("/v1/embeddings", {"input": "fox", "embedding_type": kind})).json["data"][0]
            for kind in ("float", "base64", "binary", "ubinary")
        }
        np.testing.assert_allclose(found["float"]["embedding"], vector, rtol=1e-6)
        assert base64.b64decode(found["base64"]["embedding"]) == vector.astype("<f4").tobytes()
        bits = np.packbits(vector > 0).tolist()
        assert found["ubinary"]["embedding"] == bits
        assert found["binary"]["embedding"] == [one - 128 for one in bits]
        assert not pooler.requests[-1].params.raw
        assert (await rest.post("/v1/embeddings", {"input": "fox", "normalized": False})).status == 200
        assert pooler.requests[-1].params.raw
        long = [300 + index % 50 for index in range(100)]
        cut = await rest.post("/v1/embeddings", {"input": long, "truncate": True})
        assert cut.json["usage"]["prompt_tokens"] == 64
        assert list(pooler.requests[-1].texts) == [long[:64]]
        both = await rest.post("/v1/embeddings", {"input": "a", "embedding_type": "float", "encoding_format": "float"})
        assert (both.status, both.error["param"]) == (400, "embedding_type")


@pytest.mark.parametrize("form", ["ids", "text", "texts"])
async def test_a_text_of_exactly_the_models_length_is_taken_and_one_more_token_is_not(form: str) -> None:
    pooler = FakePooler()
    async with vectors_side(pooler) as rest:
        ids = encode(rest, "fox " * 90)
        assert len(ids) > 65
        size = next(size for size in range(90) if len(encode(rest, "fox " * size)) >= 64)
        text = "fox " * size
        rest.catalog.get("").require_info().max_model_len = most = len(encode(rest, text))
        given: Any = {"ids": ids[:most], "text": text, "texts": [text, text]}[form]
        answer = await rest.post("/v1/embeddings", {"input": given})
        assert answer.status == 200, answer.body
        assert [len(one) for one in pooler.requests[0].texts] == [most] * (2 if form == "texts" else 1)
        more: Any = {"ids": ids[: most + 1], "text": f"fox {text}", "texts": [text, f"fox {text}"]}[form]
        answer = await rest.post("/v1/embeddings", {"input": more})
        assert (answer.status, answer.error["param"]) == (400, "input.1" if form == "texts" else "input")
        assert f"maximum context length is {most} tokens" in answer.error["message"]


async def test_work_for_a_client_that_left_is_cancelled() -> None:
    pooler = FakePooler()
    pooler.hold = asyncio.Event()
    async with vectors_side(pooler) as rest:
        async with RawClient.connect(rest.port) as client:
            await client.send(request_bytes("POST", "/v1/embeddings", {"input": "fox"}))
            await until(lambda: pooler.requests)
        await until(lambda: pooler.num_cancelled == 1 and not rest.admission.in_use)
        pooler.hold = None
        assert (await rest.post("/v1/embeddings", {"input": "fox"})).status == 200


async def test_models_with_vectors_of_tokens_score_by_the_best_token_of_each() -> None:
    texts, prompts = ["fox", "a river ran", "the ship"], {"query": "[Q] ", "document": "[D] "}
    async with vectors_side(FakePooler(), prompts, pools=EMBEDS_TOKENS) as rest:
        query = np.stack([vector_of([token]) for token in encode(rest, "[Q] the fox")])
        each = [np.stack([vector_of([token]) for token in encode(rest, f"[D] {text}")]) for text in texts]
        expected = [sum(max(float(a @ b) for b in document) for a in query) for document in each]
        scores = (await rest.post("/score", {"queries": "the fox", "documents": texts})).json["data"]
        assert [one["score"] for one in scores] == pytest.approx(expected, rel=1e-5)
        scores = (await rest.post("/score", {"queries": ["the fox"] * 3, "documents": texts})).json["data"]
        assert [one["score"] for one in scores] == pytest.approx(expected, rel=1e-5)
        ranked = (await rest.post("/v2/rerank", {"query": "the fox", "documents": texts, "top_n": 2})).json["results"]
        assert [one["index"] for one in ranked] == np.argsort(expected)[::-1][:2].tolist()
        refused = await rest.post("/v1/embeddings", {"input": "fox"})
        assert (refused.status, "use /pooling for it" in refused.error["message"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/embeddings", {"input": "fox"}, "mine"),
        ("/pooling", {"input": "fox"}, "pool-mine"),
        ("/rerank", {"query": "fox", "documents": ["a", "b"]}, "rerank-mine"),
        ("/v2/embed", {"texts": ["fox"]}, "embd-mine"),
    ],
)
async def test_an_aborted_request_ends_with_an_error_and_its_work(path: str, body: Any, name: str) -> None:
    pooler = FakePooler()
    pooler.hold = asyncio.Event()
    async with vectors_side(pooler) as rest, RawClient.connect(rest.port) as client:
        await client.send(request_bytes("POST", path, {**body, "request_id": "mine"}))
        await until(lambda: pooler.requests)
        assert (await rest.post("/abort_requests", {"request_ids": [name, "other"]})).json == {"num_aborted": 1}
        answer = await client.answer()
        assert (answer.status, answer.error["param"]) == (499, "request_id")
        assert answer.error["message"] == "the request mine was ended by another request of its tenant"
        await until(lambda: pooler.num_cancelled == 1 and not rest.admission.in_use)
        assert (await rest.post("/abort_requests", {"request_ids": [name]})).json == {"num_aborted": 0}
        pooler.hold = None
        assert (await rest.post(path, body)).status == 200


async def test_clients_that_left_are_counted() -> None:
    pooler = FakePooler()
    pooler.hold = asyncio.Event()
    async with vectors_side(pooler) as rest:
        async with RawClient.connect(rest.port) as client:
            await client.send(request_bytes("POST", "/classify", {"input": "fox"}))
            assert (await client.answer()).status == 400  # refused, and not counted
            await client.send(request_bytes("POST", "/score", {"queries": "fox", "documents": "a"}))
            await until(lambda: pooler.requests)
        await until(lambda: pooler.num_cancelled == 1)
        await until(lambda: "baton_gateway_aborted_total 1.0" in rest.metrics.exposition().decode())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a", 1.5]}, "input.1"),
        ({"input": ["a", None]}, "input.1"),
        ({"input": ["a", True]}, "input.1"),
        ({"input": ["a", {"text": 1}]}, "input.1.text"),
        ({"input": [[5], []]}, "input.1"),
        ({"input": [[5], [6, "b"]]}, "input.1.1"),
        ({"input": [[5], [6, -1]]}, "input.1.1"),
        ({"input": ["a", [5]]}, "input.1"),
        ({"input": [5, "a"]}, "input.1"),
        ({"input": [0, "a"]}, "input.1"),
        ({"input": "a", "dimensions": "8"}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 8.5}, "dimensions"),
        ({"input": "a", "dimensions": WIDTH + 1}, "dimensions"),
        ({"input": "a", "encoding_format": 1}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": "all"}, "truncate_prompt_tokens"),
        ({"input": "a", "model": 3}, "model"),
        ({"input": "a", "messages": [{"role": "user", "content": "b"}]}, "input"),
        ([], None),
    ],
)
async def test_wrong_types_name_the_field_and_reach_no_worker(body: Any, param: str | None) -> None:
    pooler = FakePooler()
    async with vectors_side(pooler) as rest:
        answer = await rest.post("/v1/embeddings", body)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
        assert not pooler.requests


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/embeddings", {"input": ["1 2 3 4 " * 500] * 2000}, "input"),
        ("/v1/embeddings", {"input": [[5] * 200] * 2000}, "input"),
        ("/rerank", {"query": "a", "documents": ["1 2 3 4 " * 500] * 2000}, "documents"),
    ],
)
async def test_texts_have_a_limit_together_and_the_rest_is_not_encoded(path: str, fields: Any, param: str) -> None:
    pooler = FakePooler()
    async with vectors_side(pooler) as rest:

        async def refused() -> None:
            answer = await rest.post(path, {**fields, "truncate_prompt_tokens": 8})
            assert (answer.status, answer.error["param"]) == (400, param), answer.body
            assert "have over 393216 tokens together" in answer.error["message"]

        assert await cheapest_of(refused, 2.5) < 2.5  # all of it takes 7 s
        assert not pooler.requests


async def test_a_token_id_beyond_the_vocabulary_names_its_text() -> None:
    async with vectors_side(FakePooler()) as rest:
        error = (await rest.post("/v1/embeddings", {"input": [[5], [1 << 20]]})).error
        assert error["message"] == "input.1 is token id 1048576; it must be below the vocabulary's size, 4096"
        assert error["param"] == "input.1"


@pytest.mark.parametrize(
    ("given", "param"),
    [("", "input"), ([""], "input.0"), ([[]], "input.0"), (["a", ""], "input.1"), ([[1 << 20]], "input.0"),
     ([5, 1 << 20], "input"), (["1 2 3 4 " * 2000], "input.0")],
)  # fmt: skip
async def test_a_wrong_text_of_a_list_is_named_by_its_index_also_if_it_is_alone(given: Any, param: str) -> None:
    async with vectors_side(FakePooler()) as rest:
        answer = await rest.post("/v1/embeddings", {"input": given})
        assert (answer.status, answer.error["param"]) == (400, param)


async def test_an_encoding_that_does_not_exist_lists_those_that_do() -> None:
    async with vectors_side(FakePooler()) as rest:
        error = (await rest.post("/v1/embeddings", {"input": "a", "encoding_format": "hex"})).error
        assert error["message"] == "encoding_format is 'hex'; it must be one of base64, float"
        assert error["param"] == "encoding_format"
        error = (await rest.post("/pooling", {"input": "a", "task": "x" * 200})).error
        names = "classify, embed, token_classify, token_embed"
        assert error["message"] == f"task is '{'x' * 99}...; it must be one of {names}"


async def test_a_text_of_several_that_is_too_long_is_named_by_its_index() -> None:
    async with vectors_side(FakePooler()) as rest:
        for long, number in ([300] * 65, "65"), ("fox " * 5000, "at least"):
            given = ["a", long] if isinstance(long, str) else [[5], long]
            error = (await rest.post("/v1/embeddings", {"input": given})).error
            assert error["param"] == "input.1"
            assert f"However, your input[1] resulted in {number}" in error["message"]
            assert error["message"].endswith(" tokens. Please reduce the length of input[1].")
        error = (await rest.post("/rerank", {"query": "a", "documents": ["a", "b", "fox " * 5000]})).error
        assert (error["param"], "length of documents[2]." in error["message"]) == ("documents.2", True)
        error = (await rest.post("/v1/embeddings", {"input": "fox " * 5000})).error
        assert error["message"].endswith("Please reduce the length of the input.")


MESSAGES = [{"role": "user", "content": "a"}]
GENERATIONS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/messages", {"model": "storyteller-7m", "messages": MESSAGES, "max_tokens": 4}),
    ("/v1/messages/count_tokens", {"model": "storyteller-7m", "messages": MESSAGES}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/responses", {"input": "a", "background": True}),
    # Before anything is encoded: the text is also longer than the model.
    ("/v1/completions", {"prompt": "fox " * 5000}),
    ("/v1/chat/completions/batch", {"messages": [MESSAGES]}),
]


@pytest.mark.parametrize(("path", "body"), GENERATIONS)
async def test_a_generation_by_a_model_for_vectors_names_the_right_route(path: str, body: Any) -> None:
    async with vectors_side(FakePooler()) as rest:
        answer = await rest.post(path, body)
        assert answer.status == 400, answer.body
        assert "generates no tokens; use /v1/embeddings" in answer.error["message"]
        if not path.startswith("/v1/messages"):
            assert answer.error["param"] == "model"
