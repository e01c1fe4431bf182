"""smolagents: chats, streams, schemas, tools that every answer must call, and an agent that runs one."""

import pytest
from clients.environments import PythonEnvironment
from clients.scripted_model import calls_tool

ENVIRONMENT = PythonEnvironment("smolagents", ("smolagents[openai]==1.26.0",))

pytestmark = pytest.mark.timeout(700)


@pytest.fixture(scope="module")
def found(report, scripted):
    scripted.says = calls_tool("get_weather", {"city": "Paris"}, "It is sunny in Paris.")
    return report(ENVIRONMENT, "smolagents_program.py")


def test_chats_and_streams_have_the_same_text(found, story):
    assert found["text"] == "".join(found["pieces"]) == story
    assert found["output_tokens"] == 24
    assert len(found["pieces"]) > 10


def test_the_sample_model_keeps_to_schemas_and_to_required_tools(found):
    assert found["parsed"]["hero"] in ("Tom", "Mia")
    assert found["forced"]["name"] == "get_weather"
    assert set(found["forced"]["arguments"]) == {"city"}


def test_an_agent_runs_its_tool_and_answers(found, scripted):
    assert found["tool"] == {"cities": ["Paris"], "observation": "sunny in Paris", "text": "It is sunny in Paris."}
    assert "sunny in Paris" in scripted.prompts[-1]


def test_a_wrong_model_is_an_http_error(found):
    assert found["failure"] == {"status": 404, "code": "model_not_found"}
