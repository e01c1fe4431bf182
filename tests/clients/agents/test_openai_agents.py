"""The OpenAI Agents SDK: chat completions and Responses, streams, sessions, tools that run, and typed answers."""

import pytest
from clients.environments import PythonEnvironment
from clients.scripted_model import calls_tool

ENVIRONMENT = PythonEnvironment("openai-agents", ("openai-agents==0.24.0",))
SUNNY = "It is sunny in Paris."

pytestmark = pytest.mark.timeout(700)


@pytest.fixture(scope="module")
def found(report, scripted):
    scripted.says = calls_tool("get_weather", {"city": "Paris"}, SUNNY)
    return report(ENVIRONMENT, "openai_agents_program.py")


def test_chats_and_responses_are_answered_and_streamed(found, story):
    for kind, text, num_tokens in (("chat", story, 24), ("responses", SUNNY, 9)):
        assert found[kind]["plain"] == {"text": text, "output_tokens": num_tokens, "requests": 1}
        assert "".join(found[kind]["pieces"]) == text
        assert len(found[kind]["pieces"]) > 5


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_agents_run_tools_keep_sessions_and_parse_answers(found, kind):
    assert found[kind]["tool"] == {"cities": ["Paris"], "text": SUNNY}
    assert found[kind]["roles"] == ["user", "assistant", "user", "assistant"]
    assert found[kind]["parsed"]["name"] in ("Tom", "Mia")
    assert found[kind]["failure"] == {"status": 404, "code": "model_not_found"}
