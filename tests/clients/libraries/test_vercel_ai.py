"""Vercel's AI SDK: its providers for compatible servers, OpenAI (chat, Responses) and Anthropic."""

import pytest
from clients.environments import NodeEnvironment
from clients.scripted_model import calls_tool

ENVIRONMENT = NodeEnvironment(
    "vercel-ai",
    (
        "ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/anthropic@4.0.105",
        "zod@4.6.7",
    ),
)  # fmt: skip
KINDS = ["compatible", "chat", "responses", "messages"]

pytestmark = pytest.mark.timeout(700)


@pytest.fixture(scope="module")
def found(report, scripted):
    scripted.says = calls_tool("get_weather", {"city": "Paris"}, "It is sunny in Paris.")
    return report(ENVIRONMENT, "ai_program.mjs")


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_streams_are_the_same(found, story, kind):
    answer = found[kind]
    assert answer["text"] == "".join(answer["streamed"]["pieces"]) == story
    assert len(answer["streamed"]["pieces"]) > 10
    assert answer["outputTokens"] == answer["streamed"]["outputTokens"] == 24
    assert answer["finishReason"] == answer["streamed"]["finishReason"] == "length"


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_objects_of_a_schema(found, kind):
    assert found[kind]["parsed"]["name"] in ("Tom", "Mia")


@pytest.mark.parametrize("kind", KINDS)
def test_tools_run_in_whole_and_in_streamed_answers(found, kind):
    text = "It is sunny in Paris."
    assert found[kind]["tool"] == {"cities": ["Paris", "Paris"], "steps": 2, "text": text, "streamed": text}


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_model_is_an_http_error(found, kind):
    failure = found[kind]["failure"]
    assert (failure["isCall"], failure["status"]) == (True, 404)
    assert failure["message"] == "The model `no-such-model` does not exist."
