"""Scores by the next token's probabilities, over real services, against Transformers."""

from __future__ import annotations

import pytest
import torch
from support.engine.tiny_models import load_transformers
from support.processes.stack import MODEL, Stack
from transformers import AutoTokenizer

QUERY = "The fox asked: is it a fish? "
ITEMS = ["A salmon.", "A stone."]
LABELS = [300, 301, 302]


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("item_first", [False, True])
def test_scores_are_the_probabilities_of_transformers(tandem_stack: Stack, softmax: bool, item_first: bool) -> None:
    body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS}
    status, answer = tandem_stack.post(
        "/generative_scoring", {**body, "apply_softmax": softmax, "item_first": item_first}
    )
    assert status == 200, answer
    model, tokenizer = load_transformers(MODEL), AutoTokenizer.from_pretrained(MODEL)
    for item, found in zip(ITEMS, answer["data"], strict=True):
        ids = tokenizer(item + QUERY if item_first else QUERY + item).input_ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1].float()
        chances = logits[LABELS].softmax(-1)[0] if softmax else logits.softmax(-1)[LABELS[0]]
        assert found["score"] == pytest.approx(float(chances), rel=1e-3)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": []}, "items"),
        ({"items": ["a", [999999]]}, "items.1"),
        ({"label_token_ids": [999999]}, "label_token_ids.0"),
        ({"label_token_ids": [1, 1]}, "label_token_ids"),
    ],
)
def test_bad_input_names_the_field(tandem_stack: Stack, body: dict[str, object], param: str) -> None:
    status, answer = tandem_stack.post(
        "/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [1], **body}
    )
    assert (status, answer["error"]["param"]) == (400, param)
