"""LangChain's `OpenAIEmbeddings`: documents and questions, and a vector store that finds them."""

import numpy as np
import pytest
from clients.environments import PythonEnvironment
from clients.minilm import QUESTIONS, TEXTS, by_transformers

ENVIRONMENT = PythonEnvironment("langchain", ("langchain-openai==1.7.4", "numpy==2.3.5"))

pytestmark = [pytest.mark.timeout(700), pytest.mark.clients]


@pytest.fixture(scope="module")
def found(minilm_report):
    return minilm_report(ENVIRONMENT, "langchain_program.py")


def test_embeddings_are_those_of_transformers(found, minilm_folder):
    expected = by_transformers(minilm_folder, [*TEXTS, QUESTIONS[0]])
    ours = np.array([*found["documents"], found["question"]])
    assert (expected * ours).sum(-1).min() > 0.99999


def test_a_store_finds_the_texts_of_questions(found):
    right = [first == text for first, text in zip(found["first"], TEXTS, strict=True)]
    assert sum(right) >= len(TEXTS) - 1, found["first"]


def test_a_wrong_model_is_an_http_error(found):
    assert found["failure"] == {"status": 404, "code": "model_not_found"}
