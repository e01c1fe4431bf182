"""LiteLLM's SDK: one call for three kinds of provider, all of which this gateway is."""

import pytest
from clients.environments import PythonEnvironment

ENVIRONMENT = PythonEnvironment("litellm", ("litellm==1.110.2",))

pytestmark = [pytest.mark.timeout(700), pytest.mark.clients]


@pytest.fixture(scope="module")
def found(report):
    return report(ENVIRONMENT, "litellm_program.py", LITELLM_LOCAL_MODEL_COST_MAP="True")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_a_provider_answers_streams_and_counts(found, story, provider):
    answer = found[provider]
    assert answer["text"] == "".join(answer["pieces"]) == story
    assert len(answer["pieces"]) > 10
    assert answer["finish_reason"] == "length"
    assert answer["output_tokens"] == answer["stream_tokens"] == 24


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_a_provider_calls_tools_and_makes_objects(found, provider):
    answer = found[provider]
    assert answer["tool"]["name"] == "get_weather"
    assert answer["tool"]["arguments"]["city"] in ("Paris", "Rome")
    assert answer["after_tool"] in ("length", "stop", "tool_calls")
    assert answer["parsed"]["name"] in ("Tom", "Mia")
    assert answer["failure"]["status"] == 404
    assert "The model `no-such-model` does not exist." in answer["failure"]["message"]


def test_responses_and_event_loops_get_the_same_text(found, story):
    assert found["async"] == found["responses"] == story
