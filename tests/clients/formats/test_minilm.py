"""A real sentence-transformer through the gateway: its embeddings are those of Transformers, and it searches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import openai
import pytest
from clients.minilm import NAME, QUESTIONS, TEXTS, by_transformers
from support.processes.stack import ROOT, Stack

pytestmark = [pytest.mark.timeout(600), pytest.mark.clients]


def test_embeddings_of_many_texts_are_those_of_transformers(minilm_stack: Stack, minilm_folder: Path) -> None:
    texts = [*TEXTS, *QUESTIONS, " ".join(TEXTS)]
    with openai.OpenAI(base_url=f"{minilm_stack.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model=NAME, input=texts)
    found = np.array([each.embedding for each in answer.data])
    expected = by_transformers(minilm_folder, texts)
    assert found.shape == (len(texts), 384)
    assert (found * expected).sum(-1).min() > 0.99999


def test_questions_find_their_texts(minilm_stack: Stack) -> None:
    ranks = []
    for number, question in enumerate(QUESTIONS):
        status, answer = minilm_stack.post("/rerank", {"query": question, "documents": TEXTS})
        assert status == 200, answer
        ranks.append([one["index"] for one in answer["results"]].index(number) + 1)
    gains = 1 / np.log2(1 + np.array(ranks))
    assert gains.mean() > 0.9, ranks  # nDCG with one relevant text


def test_the_example_of_a_search_finds_the_answer(minilm_stack: Stack) -> None:
    program = ROOT / "examples" / "python" / "semantic_search.py"
    words = [sys.executable, str(program), minilm_stack.config.grpc_listen, "Why do earthquakes happen?"]
    first = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()[0]
    assert first.endswith("Tectonic plates stick, bend and suddenly slip along faults.")


def test_a_text_beyond_the_model_is_refused_and_can_be_cut(minilm_stack: Stack) -> None:
    long = "sleep " * 400
    status, answer = minilm_stack.post("/v1/embeddings", {"input": ["short", long]})
    assert status == 400
    assert "256" in answer["error"]["message"]
    status, answer = minilm_stack.post("/v1/embeddings", {"input": ["short", long], "truncate_prompt_tokens": -1})
    assert status == 200, answer
    assert len(answer["data"]) == 2


def test_a_question_of_a_generation_names_the_right_route(minilm_stack: Stack) -> None:
    status, answer = minilm_stack.post("/v1/completions", {"prompt": "Hello"})
    assert status == 400
    assert "/v1/embeddings" in answer["error"]["message"]
