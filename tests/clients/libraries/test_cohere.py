"""Cohere's client: embeddings in every type, many at once, ranked documents, errors."""

import numpy as np
import pytest
from clients.environments import PythonEnvironment
from clients.minilm import QUESTIONS, TEXTS, by_transformers

ENVIRONMENT = PythonEnvironment("cohere", ("cohere==7.3.1",))

pytestmark = [pytest.mark.timeout(700), pytest.mark.clients]


@pytest.fixture(scope="module")
def found(minilm_report):
    return minilm_report(ENVIRONMENT, "cohere_program.py")


@pytest.fixture(scope="module")
def expected(minilm_folder):
    return by_transformers(minilm_folder, TEXTS), by_transformers(minilm_folder, QUESTIONS)


def test_embeddings_are_those_of_transformers(found, expected):
    for vectors, ours in zip(expected, (found["float"], found["questions"]), strict=True):
        assert (vectors * np.array(ours)).sum(-1).min() > 0.99999
    assert found["many"] == 20 * len(TEXTS)
    assert found["tokens"] > 100


def test_small_types_have_the_values_of_the_floats(found):
    floats = np.array(found["float"])
    np.testing.assert_allclose(np.array(found["int8"]) / 127, floats, atol=0.005)
    assert (np.array(found["uint8"]) - 128 == found["int8"]).all()
    signs = np.unpackbits(np.array(found["ubinary"], np.uint8), axis=1)
    assert (signs == (floats > 0)).all()
    assert (np.array(found["binary"]) + 128 == found["ubinary"]).all()


def test_documents_are_ranked(found, expected):
    texts, questions = expected
    scores = texts @ questions[0]
    assert [index for index, _ in found["ranked"]] == np.argsort(-scores)[:3].tolist()
    assert [score for _, score in found["ranked"]] == pytest.approx(np.sort(scores)[::-1][:3], abs=1e-4)


def test_errors_have_their_status_and_message(found):
    assert found["unknown"]["status"] == 404
    assert found["empty"] == {"status": 400, "message": "texts.1 is empty; give at least one character"}
