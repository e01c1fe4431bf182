"""What the sample model shows of the platform: stories, calls of tools, JSON and reasoning, with the default flags."""

from __future__ import annotations

import json

import pytest
from support.processes.stack import MODEL_NAME

STORY = "Tell me a story about a dog and a river."
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather somewhere.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def ask(stack, text, **fields):
    status, body = stack.post(
        "/v1/chat/completions",
        {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": 300,
            **fields,
        },
    )
    assert status == 200, body
    return body["choices"][0]


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("What is the weather in Paris?", "get_weather", {"city": "Paris"}),
        ("What is 17 plus 25?", "add", {"a": 17, "b": 25}),
    ],
)
def test_it_chooses_the_tool_and_fills_in_the_arguments(tandem_stack, text, name, arguments):
    choice = ask(tandem_stack, text, tools=[ADD, WEATHER])
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (name, arguments)


def test_it_writes_a_story_although_tools_are_given(tandem_stack):
    message = ask(tandem_stack, STORY, tools=[ADD, WEATHER])["message"]
    assert not message.get("tool_calls")
    assert len(message["content"].split()) > 30


def test_it_answers_in_json_on_request(tandem_stack):
    asked = "My dog is 7 years old and brown. Answer as JSON with age and colour."
    assert json.loads(ask(tandem_stack, asked)["message"]["content"]) == {"age": 7, "colour": "brown"}


def test_it_reasons_if_the_request_enables_it(tandem_stack):
    thinking = ask(tandem_stack, STORY, chat_template_kwargs={"enable_thinking": True})["message"]
    assert "story" in thinking["reasoning_content"]
    assert len(thinking["content"].split()) > 30
    assert "</think>" not in thinking["content"]
    plain = ask(tandem_stack, STORY)["message"]
    assert not plain.get("reasoning_content")


def test_it_uses_facts_from_earlier_turns(tandem_stack):
    messages = [
        {"role": "user", "content": "Hello, my name is Clara."},
        {"role": "assistant", "content": "I will remember that."},
        {"role": "user", "content": "What is my name?"},
    ]
    assert ask(tandem_stack, "", messages=messages)["message"]["content"] == "Your name is Clara."
