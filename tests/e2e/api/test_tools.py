"""Forced tool calls on a running stack: the model is held to the schema while it decodes."""

import json

import openai
import pytest
from support.processes.stack import MODEL_NAME

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Paris", "Rome"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {
                "type": "object",
                "properties": {"zone": {"enum": ["UTC"]}},
                "required": ["zone"],
                "additionalProperties": False,
            },
        },
    },
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
MESSAGES = [{"role": "user", "content": "Once upon a time, what was the weather?"}]


@pytest.fixture(scope="module")
def client(tandem_stack):
    with openai.OpenAI(base_url=f"{tandem_stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def fits(name, arguments):
    if name == "get_time":
        return arguments == {"zone": "UTC"}
    return arguments["city"] in ("Paris", "Rome") and 1 <= arguments["days"] <= 9 and len(arguments) == 2


@pytest.mark.parametrize("seed", range(3))
def test_a_named_function_is_called_with_arguments_that_fit(client, seed):
    answer = client.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, seed=seed, max_tokens=200
    )
    choice = answer.choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert fits("get_weather", json.loads(call.function.arguments))
    assert (choice.finish_reason, choice.message.content) == ("stop", None)


def test_a_required_call_streams_and_fits(client):
    with client.chat.completions.stream(
        model=MODEL_NAME,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
        max_tokens=200,
    ) as stream:
        final = stream.get_final_completion()
    choice = final.choices[0]
    (call,) = choice.message.tool_calls
    assert fits(call.function.name, json.loads(call.function.arguments))
    assert choice.finish_reason == "tool_calls"


def test_a_schema_that_no_grammar_follows_is_refused_by_name(client):
    broken = [{"type": "function", "function": {"name": "f", "parameters": {"type": "no such type"}}}]
    named = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, tools=broken, tool_choice=named)
    assert refused.value.param == "tools"


ANSWER = {
    "type": "object",
    "properties": {"mood": {"enum": ["happy", "sad"]}},
    "required": ["mood"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": ANSWER}}


def test_with_a_form_for_the_text_the_answer_is_that_or_a_call(start_stack):
    stack = start_stack(
        executor="cpu", prefill_workers=0, threads=1, extra={"gateway": ("--tool-call-parser", "hermes")}
    )
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]

    def answers(tools, begin, **fields):
        status, begins = stack.post("/tokenize", {"prompt": begin, "add_special_tokens": False})
        assert status == 200, begins
        bias = {str(begins["tokens"][0]): 100}
        body = {"messages": MESSAGES, "tools": tools, "response_format": FORMAT, "max_tokens": 120, "n": 3, "seed": 1}
        status, answer = stack.post("/v1/chat/completions", body | fields | {"logit_bias": bias})
        assert status == 200, answer
        return answer["choices"]

    for choice in answers(TOOLS, "{"):
        assert json.loads(choice["message"]["content"])["mood"] in ("happy", "sad")
        assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)
    for choice in answers(strict, "<", parallel_tool_calls=False):
        assert choice["finish_reason"] == "tool_calls"
        (call,) = (call["function"] for call in choice["message"]["tool_calls"])
        assert fits(call["name"], json.loads(call["arguments"]))
        assert choice["message"]["content"] is None
