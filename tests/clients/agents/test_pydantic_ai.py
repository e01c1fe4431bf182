"""pydantic-ai: chat, Responses and Messages, streams, tools that run, and typed answers."""

import pytest
from clients.environments import PythonEnvironment
from clients.scripted_model import calls_tool

ENVIRONMENT = PythonEnvironment("pydantic-ai", ("pydantic-ai-slim[openai,anthropic]==2.68.0",))

pytestmark = pytest.mark.timeout(700)


@pytest.fixture(scope="module")
def found(report, scripted):
    scripted.says = calls_tool("get_weather", {"city": "Paris"}, "It is sunny in Paris.")
    return report(ENVIRONMENT, "pydantic_ai_program.py")


def test_every_api_answers_the_same(found, story):
    assert found["text"] == found["responses"] == found["messages"] == story
    assert "".join(found["pieces"]) == story
    assert len(found["pieces"]) > 10
    assert found["usage"]["output_tokens"] == 24


@pytest.mark.parametrize("way", ["by_tool", "by_schema"])
def test_answers_are_objects_of_a_class(found, way):
    assert found[way]["name"] in ("Tom", "Mia")
    assert 1 <= found[way]["age"] <= 9


def test_an_agent_runs_its_tool_and_answers(found, scripted):
    assert found["tool"] == {"cities": ["Paris"], "text": "It is sunny in Paris."}
    assert "sunny in Paris" in scripted.prompts[-1]


def test_a_wrong_model_is_an_http_error(found):
    assert found["failure"]["status"] == 404
    assert found["failure"]["body"]["code"] == "model_not_found"
