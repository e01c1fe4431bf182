"""AutoGen: chats, streams, typed answers, and an agent that runs its tool and reflects on the result."""

import pytest
from clients.environments import PythonEnvironment
from clients.scripted_model import calls_tool

ENVIRONMENT = PythonEnvironment("autogen", ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"))

pytestmark = pytest.mark.timeout(700)


@pytest.fixture(scope="module")
def found(report, scripted):
    scripted.says = calls_tool("get_weather", {"city": "Paris"}, "It is sunny in Paris.")
    return report(ENVIRONMENT, "autogen_program.py")


def test_chats_and_streams_have_the_same_text(found, story):
    assert found["text"] == "".join(found["pieces"]) == story
    assert found["finish_reason"] == "length"
    assert found["output_tokens"] == found["stream_tokens"] == 24
    assert len(found["pieces"]) > 10


def test_answers_are_objects_of_a_class(found):
    assert found["parsed"]["name"] in ("Tom", "Mia")


def test_an_agent_runs_its_tool_and_answers(found, scripted):
    events = ["TextMessage", "ToolCallRequestEvent", "ToolCallExecutionEvent", "TextMessage"]
    assert found["tool"] == {"cities": ["Paris"], "events": events, "text": "It is sunny in Paris."}
    assert "sunny in Paris" in scripted.prompts[-1]


def test_a_wrong_model_is_an_http_error(found):
    assert found["failure"] == {"status": 404, "code": "model_not_found"}
