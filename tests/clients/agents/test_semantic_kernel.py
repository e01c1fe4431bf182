"""Semantic Kernel: chats, streams, typed answers, and a plugin's function that the kernel runs."""

import pytest
from clients.environments import PythonEnvironment
from clients.scripted_model import calls_tool

ENVIRONMENT = PythonEnvironment("semantic-kernel", ("semantic-kernel==1.45.0",))

pytestmark = [pytest.mark.timeout(700), pytest.mark.clients]


@pytest.fixture(scope="module")
def found(report, scripted):
    scripted.says = calls_tool("weather-get_weather", {"city": "Paris"}, "It is sunny in Paris.")
    return report(ENVIRONMENT, "semantic_kernel_program.py")


def test_chats_and_streams_have_the_same_text(found, story):
    assert found["text"] == "".join(found["pieces"]) == story
    assert (found["finish_reason"], found["output_tokens"]) == ("length", 24)
    assert len(found["pieces"]) > 10


def test_answers_are_objects_of_a_class(found):
    assert found["parsed"]["name"] in ("Tom", "Mia")


def test_the_kernel_runs_its_function_and_answers(found, scripted):
    assert found["tool"] == {"cities": ["Paris"], "text": "It is sunny in Paris."}
    assert "sunny in Paris" in scripted.prompts[-1]


def test_a_wrong_model_is_reported_with_its_name(found):
    assert "The model `no-such-model` does not exist." in found["failure"]
