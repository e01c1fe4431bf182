"""Embeddings over real services: the sample model converted, with the official client."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import openai
import pytest
import torch
from support.engine.tiny_models import load_transformers
from support.processes.stack import MODEL, MODEL_NAME, ROOT, Stack, start_stack, wait_until
from transformers import AutoTokenizer

from baton.v1 import inference_pb2, inference_pb2_grpc, vectors_pb2

DOCUMENTS = re.compile(r'^    "(.+)",$', re.MULTILINE)  # of the example
TEXTS = ["Once upon a time there was a fox.", "The fox ran home.", "A ship sailed over the sea."]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with ExitStack() as cleanup:
        folder: Path = tmp_path_factory.mktemp("embeddings")
        extra = {
            "worker": ("--convert", "embed", "--max-model-len", "1024"),
            "gateway": ("--batch-store", str(folder / "store")),
        }
        yield start_stack(folder, cleanup, prefill_workers=0, decode_workers=2, threads=1, extra=extra)


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """Embeddings by Transformers: the last token's hidden state, normalized."""
    model, tokenizer = load_transformers(MODEL), AutoTokenizer.from_pretrained(MODEL)
    found = []
    with torch.inference_mode():
        for text in TEXTS:
            ids = torch.tensor([tokenizer(text).input_ids])
            found.append(model.model(ids).last_hidden_state[0, -1])  # type: ignore[operator, union-attr]
    return torch.nn.functional.normalize(torch.stack(found), dim=-1).numpy()


def test_the_official_client_gets_what_transformers_computes(client: openai.OpenAI, expected: np.ndarray) -> None:
    answer = client.embeddings.create(model=MODEL_NAME, input=TEXTS)  # it asks for base64
    found = np.array([each.embedding for each in answer.data])
    assert (found * expected).sum(-1).min() > 0.99999
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 20
    floats = client.embeddings.create(model=MODEL_NAME, input=TEXTS[0], encoding_format="float").data[0].embedding
    np.testing.assert_allclose(floats, found[0], atol=1e-6)


def test_all_forms_of_input(stack: Stack) -> None:
    ids = stack.post("/tokenize", {"prompt": TEXTS[0]})[1]["tokens"]
    vectors = []
    for given in (TEXTS[0], [TEXTS[0]], ids, [ids]):
        status, answer = stack.post("/v1/embeddings", {"input": given, "encoding_format": "base64"})
        assert status == 200, answer
        vectors.append(np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4"))
    for vector in vectors[1:]:
        np.testing.assert_allclose(vector, vectors[0], atol=1e-5)
    status, answer = stack.post("/v1/embeddings", {"messages": [{"role": "user", "content": "Hello"}]})
    assert status == 200
    assert len(answer["data"]) == 1


def test_vectors_of_tokens_and_truncated_texts(stack: Stack) -> None:
    ids = stack.post("/tokenize", {"prompt": TEXTS[0]})[1]["tokens"]
    status, answer = stack.post("/pooling", {"input": ids, "task": "token_embed"})
    assert status == 200, answer
    assert len(answer["data"][0]["data"]) == len(ids)
    cut = stack.post("/v1/embeddings", {"input": ids, "truncate_prompt_tokens": 3})[1]
    assert cut["usage"]["prompt_tokens"] == 3
    first = stack.post("/v1/embeddings", {"input": ids[:3]})[1]
    np.testing.assert_allclose(cut["data"][0]["embedding"], first["data"][0]["embedding"], atol=1e-5)


def test_a_batch_embeds_its_lines(client: openai.OpenAI, expected: np.ndarray) -> None:
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/embeddings", "body": {"model": MODEL_NAME, "input": text}}
        for n, text in enumerate(TEXTS)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(made.id).status == "completed", "the batch to end", 60)
    output = client.batches.retrieve(made.id).output_file_id
    assert output is not None
    results = sorted(map(json.loads, client.files.content(output).text.splitlines()), key=lambda one: one["custom_id"])
    found = np.array([one["response"]["body"]["data"][0]["embedding"] for one in results])
    assert (found * expected).sum(-1).min() > 0.99999
    scored = client.batches.create(input_file_id=file.id, endpoint="/v1/score", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(scored.id).status == "failed", "the wrong URL to be found", 60)


def test_scores_are_cosines_of_embeddings(stack: Stack, expected: np.ndarray) -> None:
    status, answer = stack.post("/score", {"queries": TEXTS[0], "documents": TEXTS[1:]})
    assert status == 200, answer
    np.testing.assert_allclose([one["score"] for one in answer["data"]], expected[1:] @ expected[0], atol=1e-4)
    each = stack.post("/v1/score", {"text_1": TEXTS, "text_2": TEXTS})[1]
    np.testing.assert_allclose([one["score"] for one in each["data"]], 1, atol=1e-4)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ordered_by_their_scores(stack: Stack, expected: np.ndarray, path: str) -> None:
    body = {"query": TEXTS[0], "documents": [TEXTS[2], {"text": TEXTS[0]}, TEXTS[1]], "top_n": 2}
    status, answer = stack.post(path, body)
    assert status == 200, answer
    first, second = answer["results"]
    assert first["index"] == 1
    assert first["relevance_score"] == pytest.approx(1, abs=1e-4)
    best = max(((expected[2] @ expected[0], 0), (expected[1] @ expected[0], 2)))
    assert (second["index"], second["relevance_score"]) == (best[1], pytest.approx(best[0], abs=1e-4))
    assert ("document" in first) is (path != "/v2/rerank")


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        ("/score", {}, "give queries and documents", "queries"),
        ("/score", {"queries": "a"}, "documents is required", "documents"),
        ("/score", {"queries": ["a", "b"], "documents": ["c"]}, "2 texts and documents 1", "queries"),
        ("/score", {"queries": "a", "documents": ["b", ""]}, "documents.1 is empty", "documents.1"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "documents"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents.1 is empty", "documents.1"),
        ("/rerank", {"query": "", "documents": ["b"]}, "query", "query"),
    ],
)
def test_bad_pairs_name_the_field(stack: Stack, path: str, body: dict[str, object], message: str, param: str) -> None:
    status, answer = stack.post(path, body)
    assert status == 400
    assert message in answer["error"]["message"]
    assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, "give either input or messages", "input"),
        ({"input": ""}, "input is empty", "input"),
        ({"input": []}, "give 1 to 2048", "input"),
        ({"input": ["a"] * 2049}, "2049 texts", "input"),
        ({"input": ["a", ""]}, "input.1 is empty", "input.1"),
        ({"input": ["a", [1]]}, "input.1 has another type", "input.1"),
        ({"input": [[1], [999999]]}, "999999", "input.1"),
        ({"input": [[5] * 70000]}, "maximum context length", "input.0"),
        ({"input": [5] * 70000}, "maximum context length", "input"),
        ({"input": "a", "dimensions": 7}, "cannot be cut", "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "give -1, or 1 to", "truncate_prompt_tokens"),
        ({"input": ["a", "b" * 70000]}, "maximum context length", "input.1"),
        ({"input": "a", "late_chunking": True}, "late_chunking is not supported", "late_chunking"),
        ({"input": "a", "return_multivector": True}, "use /pooling", "return_multivector"),
        ({"input": [1], "task": "retrieval.query"}, "task is for texts", "task"),
        (
            {"input": "a", "truncate_prompt_tokens": 3, "enable_chunked_processing": True},
            "give either",
            "enable_chunked_processing",
        ),
        ({"input": "a", "model": "other"}, "does not exist", "model"),
    ],
)
def test_bad_input_names_the_field(stack: Stack, body: dict[str, object], message: str, param: str) -> None:
    status, answer = stack.post("/v1/embeddings", body)
    assert status in (400, 404)
    assert message in answer["error"]["message"]
    assert answer["error"]["param"] == param


def test_a_wrong_task_names_the_route_to_use(stack: Stack) -> None:
    status, answer = stack.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
    assert (status, "use /v1/embeddings" in answer["error"]["message"]) == (400, True)
    status, answer = stack.post("/classify", {"input": "Hi"})
    assert (status, "use /v1/embeddings or /pooling" in answer["error"]["message"]) == (400, True)


def test_a_text_longer_than_the_model_is_the_mean_of_its_pieces(stack: Stack) -> None:
    info = stack.get("/v1/models")[1]["data"][0]
    size = info["max_model_len"]
    ids = [5 + index % 200 for index in range(size + size // 2)]
    status, answer = stack.post("/v1/embeddings", {"input": [ids, [7, 8]], "enable_chunked_processing": True})
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == len(ids) + 2
    pieces = [ids[:size], ids[size:]]
    raw = stack.post("/v1/embeddings", {"input": pieces, "use_activation": False})[1]["data"]
    mean = np.average([one["embedding"] for one in raw], axis=0, weights=[len(piece) for piece in pieces])
    first, short = (np.array(one["embedding"]) for one in answer["data"])
    np.testing.assert_allclose(first, mean / np.linalg.norm(mean), atol=1e-5)
    alone = stack.post("/v1/embeddings", {"input": [7, 8]})[1]["data"][0]["embedding"]
    np.testing.assert_allclose(short, alone, atol=1e-5)


def test_a_text_keeps_its_start_or_its_end(stack: Stack) -> None:
    ids = stack.post("/tokenize", {"prompt": TEXTS[0]})[1]["tokens"]
    for side, kept in (("left", ids[-4:]), ("right", ids[:4])):
        body = {"input": ids, "truncate_prompt_tokens": 4, "truncation_side": side}
        cut = stack.post("/v1/embeddings", body)[1]["data"][0]["embedding"]
        alone = stack.post("/v1/embeddings", {"input": kept})[1]["data"][0]["embedding"]
        np.testing.assert_allclose(cut, alone, atol=1e-5)


def test_cohere_gets_every_type(stack: Stack, expected: np.ndarray) -> None:
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    body = {"texts": TEXTS, "input_type": "search_document", "embedding_types": kinds, "model": MODEL_NAME}
    status, answer = stack.post("/v2/embed", body)
    assert status == 200, answer
    assert (answer["response_type"], answer["texts"]) == ("embeddings_by_type", TEXTS)
    found = {kind: answer["embeddings"][kind] for kind in kinds}
    np.testing.assert_allclose(found["float"], expected, atol=1e-4)
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in found["base64"]]
    np.testing.assert_allclose(decoded, found["float"], atol=1e-6)
    np.testing.assert_allclose(np.array(found["int8"]) / 127, expected, atol=0.005)
    assert (np.array(found["uint8"]) - 128).tolist() == found["int8"]
    signs = np.unpackbits(np.array(found["ubinary"], np.uint8), axis=1)
    assert (signs == (np.array(found["float"]) > 0)).all()
    assert (np.array(found["binary"]) + 128).tolist() == found["ubinary"]
    assert answer["meta"]["billed_units"]["input_tokens"] > 20
    parts = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    assert stack.post("/v2/embed", {"inputs": parts})[1]["embeddings"]["float"] == found["float"]


def test_cohere_cuts_long_texts_unless_told_otherwise(stack: Stack) -> None:
    texts = {"texts": ["Once upon a time. " * 6000]}
    size = stack.get("/v1/models")[1]["data"][0]["max_model_len"]
    status, answer = stack.post("/v2/embed", texts)
    assert status == 200, answer
    assert answer["meta"]["billed_units"]["input_tokens"] == size
    ends = [stack.post("/v2/embed", {**texts, "max_tokens": 5, "truncate": end}) for end in ("START", "END")]
    assert [answer["meta"]["billed_units"]["input_tokens"] for _, answer in ends] == [5, 5]
    status, answer = stack.post("/v2/embed", {**texts, "truncate": "NONE"})
    assert (status, answer["error"]["param"]) == (400, "texts.0")


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, "give either texts or inputs", "texts"),
        ({"texts": ["a", ""]}, "texts.1 is empty", "texts.1"),
        ({"images": ["data:"]}, "images are not embedded", "images"),
        ({"inputs": [{"content": [{"type": "image_url"}]}]}, "is image_url", "inputs.0.content.0"),
        ({"texts": ["a"], "embedding_types": ["int4"]}, "int4", "embedding_types.0"),
        ({"texts": ["a"], "output_dimension": 7}, "cannot be cut", "output_dimension"),
        ({"texts": ["a"], "truncate": "NONE", "max_tokens": 5}, "max_tokens cuts", "max_tokens"),
    ],
)
def test_bad_input_of_cohere_names_the_field(stack: Stack, body: dict[str, object], message: str, param: str) -> None:
    status, answer = stack.post("/v2/embed", body)
    assert status == 400
    assert message in answer["error"]["message"]
    assert answer["error"]["param"] == param


def test_two_thousand_texts_in_one_request(stack: Stack, expected: np.ndarray) -> None:
    texts = [TEXTS[index % 3] if index % 100 == 0 else "a" for index in range(2048)]
    status, answer = stack.post("/v1/embeddings", {"input": texts, "encoding_format": "base64"})
    assert status == 200, answer
    found = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in answer["data"]]
    for index in range(0, 2048, 100):
        assert found[index] @ expected[index % 3] > 0.9999


def test_the_task_is_stated(stack: Stack) -> None:
    assert stack.get("/v1/models")[1]["data"][0]["tasks"] == ["embed", "token_embed"]
    status, answer = stack.post("/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [1]})
    assert (status, "use /v1/embeddings" in answer["error"]["message"]) == (400, True)


def test_grpc_clients_get_the_same(stack: Stack, expected: np.ndarray) -> None:
    with grpc.insecure_channel(stack.config.grpc_listen) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        (part,) = stub.Embed(inference_pb2.EmbedRequest(texts=TEXTS), timeout=60)
        found = np.array([list(one.values) for one in part.embeddings])
        assert (found * expected).sum(-1).min() > 0.99999
        ranked = stub.Rerank(vectors_pb2.RerankRequest(query=TEXTS[0], documents=TEXTS), timeout=60)
        scores = expected @ expected[0]
        assert [one.index for one in ranked.results] == np.argsort(-scores).tolist()
        assert [one.score for one in ranked.results] == pytest.approx(np.sort(scores)[::-1], abs=1e-4)


def test_the_example_of_a_search_ranks_as_rerank_does(stack: Stack) -> None:
    path, question = ROOT / "examples" / "python" / "semantic_search.py", "The fox ran home."
    words = [sys.executable, str(path), stack.config.grpc_listen, question]
    lines = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    scores, texts = zip(*(line.split("  ", 1) for line in lines), strict=True)
    documents = DOCUMENTS.findall(path.read_text())
    results = stack.post("/rerank", {"query": question, "documents": documents, "top_n": 3})[1]["results"]
    assert [documents.index(text) for text in texts] == [one["index"] for one in results]
    assert [float(score) for score in scores] == pytest.approx([one["relevance_score"] for one in results], abs=1e-3)


def test_a_killed_worker_loses_no_text(stack: Stack, client: openai.OpenAI) -> None:
    texts = [f"{text} {number}" for number in range(200) for text in TEXTS]
    undisturbed = [each.embedding for each in client.embeddings.create(model=MODEL_NAME, input=texts).data]
    victim = stack.workers[0]
    with ThreadPoolExecutor(2) as pool:
        timer = threading.Timer(0.3, victim.kill)
        timer.start()
        futures = [pool.submit(client.embeddings.create, model=MODEL_NAME, input=texts) for _ in range(2)]
        answers = [future.result() for future in futures]
        timer.join()
    for answer in answers:
        np.testing.assert_allclose([each.embedding for each in answer.data], undisturbed, atol=1e-4)
    victim.start()
    victim.wait_ready()
