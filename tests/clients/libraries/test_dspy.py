"""DSPy: completions, Responses, typed predictions, and tool calls."""

import pytest
from clients.environments import PythonEnvironment
from clients.scripted_model import calls_tool

ENVIRONMENT = PythonEnvironment("dspy", ("dspy==3.4.1",))

pytestmark = [pytest.mark.timeout(700), pytest.mark.clients]


@pytest.fixture(scope="module")
def found(report, scripted):
    scripted.says = calls_tool("get_weather", {"city": "Paris"}, "It is sunny in Paris.")
    return report(ENVIRONMENT, "dspy_program.py")


def test_chats_and_responses_have_the_same_text(found, story):
    assert found["text"] == found["responses"] == story
    assert found["output_tokens"] == 24


def test_predictions_have_the_types_of_their_signature(found):
    assert found["predicted"]["hero"] in ("Tom", "Mia")
    assert found["predicted"]["kind"] in ("dog", "girl")


def test_tool_calls_run(found):
    assert found["tool"] == {"cities": ["Paris"], "results": ["sunny in Paris"]}


def test_a_wrong_model_is_reported_with_its_name(found):
    assert "The model `no-such-model` does not exist." in found["failure"]
