"""Inspect: evaluations over three of its providers, with a schema, with a tool, and one that fails."""

import json

import pytest
from clients.environments import PythonEnvironment
from clients.scripted_model import calls_tool

ENVIRONMENT = PythonEnvironment("inspect-ai", ("inspect-ai==0.3.285", "openai==3.57.0", "anthropic==2.13.0"))

pytestmark = [pytest.mark.timeout(700), pytest.mark.clients]


@pytest.fixture(scope="module")
def found(report, scripted):
    scripted.says = calls_tool("get_weather", {"city": "Paris"}, "It is sunny in Paris.")
    return report(ENVIRONMENT, "inspect_ai_program.py")


@pytest.mark.parametrize("provider", ["openai", "openai-api", "anthropic"])
def test_evaluations_have_every_answer_and_its_tokens(found, provider):
    assert found[provider]["status"] == "success"
    assert len(found[provider]["texts"]) == 3
    assert all(found[provider]["texts"])
    assert found[provider]["output_tokens"] == 3 * 24


def test_two_providers_get_the_same_texts(found):
    assert found["openai"]["texts"] == found["openai-api"]["texts"]


def test_answers_keep_to_a_schema(found):
    (text,) = found["shaped"]["texts"]
    assert isinstance(json.loads(text)["is_dog"], bool)


def test_an_evaluation_runs_its_tool(found, scripted):
    assert found["tool"]["run"]["texts"] == ["It is sunny in Paris."]
    assert found["tool"]["run"]["accuracy"] == 1.0
    assert found["tool"]["cities"] == ["Paris"]
    assert "sunny in Paris" in scripted.prompts[-1]


def test_an_evaluation_of_a_wrong_model_fails_with_its_name(found):
    assert found["failure"]["status"] == "error"
    assert "The model `no-such-model` does not exist." in found["failure"]["error"]
