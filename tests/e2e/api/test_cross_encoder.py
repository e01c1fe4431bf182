"""A cross-encoder over real services: pairs are scored as Transformers scores them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support.engine.encoder_models import ENCODERS
from support.engine.pooling_models import make_classifier
from support.processes.stack import Stack, start_stack
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel

QUERY = "the fox ran"
DOCUMENTS = ["a ship sailed over the sea", "the fox ran home", "once upon a time", "there was a fox " * 30]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted(set(" ".join([QUERY, *DOCUMENTS]).split()))]


def make_tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(word, WORDS.index(word)) for word in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", special)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cross-encoder")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return make_classifier(ENCODERS["bert"].make(num_labels=1), folder)


@pytest.fixture(scope="module")
def stack(model: PreTrainedModel, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with ExitStack() as cleanup:
        yield start_stack(
            tmp_path_factory.mktemp("logs"), cleanup,
            model=str(folder), served_model_name=("pairs",), prefill_workers=0, decode_workers=1, threads=1,
        )  # fmt: skip


@torch.inference_mode()
def expected(model: PreTrainedModel, documents: list[str], most: int = 0) -> list[float]:
    """Scores by Transformers; of documents cut to `most` tokens."""
    tokenizer, found = make_tokenizer(), []
    for document in documents:
        encoded = tokenizer.encode(QUERY, " ".join(document.split()[: most or None]))
        ids, types = torch.tensor([encoded.ids]), torch.tensor([encoded.type_ids])
        found.append(model(ids, token_type_ids=types).logits.sigmoid().item())
    return found


def test_pairs_are_scored_as_transformers_scores_them(stack: Stack, model: PreTrainedModel) -> None:
    status, answer = stack.post("/score", {"queries": QUERY, "documents": DOCUMENTS[:3]})
    assert status == 200, answer
    scores = [one["score"] for one in answer["data"]]
    assert scores == pytest.approx(expected(model, DOCUMENTS[:3]), abs=1e-4)
    each = stack.post("/v1/score", {"text_1": [QUERY] * 2, "text_2": DOCUMENTS[1:3]})[1]
    assert [one["score"] for one in each["data"]] == pytest.approx(scores[1:], abs=1e-4)
    assert each["usage"]["prompt_tokens"] == (3 + 4 + 3) + (3 + 4 + 3)


def test_documents_are_ordered_by_their_scores_and_cut_as_asked(stack: Stack, model: PreTrainedModel) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "max_tokens_per_doc": 5}
    status, answer = stack.post("/rerank", body)
    assert status == 200, answer
    scores = expected(model, DOCUMENTS, most=5)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    assert [one["index"] for one in answer["results"]] == order
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx(sorted(scores)[::-1], abs=1e-4)


def test_documents_beyond_the_model_are_refused_by_name_or_cut(stack: Stack, model: PreTrainedModel) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS}
    status, answer = stack.post("/rerank", body)
    assert (status, answer["error"]["param"]) == (400, "documents.3")
    assert "maximum context length is 96 tokens" in answer["error"]["message"]
    status, answer = stack.post("/rerank", {**body, "truncate_prompt_tokens": -1})
    assert status == 200, answer
    scores = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert scores[3] == pytest.approx(expected(model, DOCUMENTS[3:], most=96 - 3 - 3)[0], abs=1e-4)
    status, answer = stack.post("/rerank", {"query": f"{QUERY} " * 40, "documents": DOCUMENTS[:1]})
    assert (status, answer["error"]["param"]) == (400, "query")


def test_embeddings_of_a_cross_encoder_name_the_right_route(stack: Stack) -> None:
    status, answer = stack.post("/v1/embeddings", {"input": QUERY})
    assert status == 400
    assert "/classify" in answer["error"]["message"]
