"""Outlines: text, streams, JSON schemas, and, with its client for vLLM, choices, regular expressions and grammars."""

import re

import pytest
from clients.environments import PythonEnvironment

ENVIRONMENT = PythonEnvironment("outlines", ("outlines[openai]==1.3.3",))

pytestmark = pytest.mark.timeout(700)


@pytest.fixture(scope="module")
def found(report):
    return report(ENVIRONMENT, "outlines_program.py")


def test_texts_and_streams_are_the_same(found, story):
    assert found["text"] == found["vllm"]["text"] == "".join(found["pieces"]) == story
    assert len(found["pieces"]) > 10


def test_answers_have_the_form_that_was_asked_for(found):
    assert found["parsed"]["name"] in ("Tom", "Mia")
    assert found["vllm"]["parsed"]["name"] in ("Tom", "Mia")
    assert found["vllm"]["choice"] in ("cat", "dog")
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}", found["vllm"]["regex"])
    assert found["vllm"]["grammar"] in ("yes", "no")
