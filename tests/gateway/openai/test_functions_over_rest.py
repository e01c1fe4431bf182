"""`functions` and `function_call`, the older form of tools, through the whole gateway with OpenAI's client."""

import json

import pytest
from support.gateway.rest_harness import RawClient
from support.gateway.scripted_gateway import model_folder
from support.gateway.tools_rig import CALL, MESSAGES, QWEN, SECOND_CALL, THOUGHT, TOOLS, rig

from baton.rpc.errors import InvalidRequest

FUNCTIONS = [tool["function"] for tool in TOOLS]


@pytest.fixture
async def qwen(tmp_path):
    async with rig(model_folder(tmp_path / "qwen", QWEN)) as made:
        yield made


async def test_a_call_is_the_messages_function_call(qwen):
    answer = await qwen.chat(THOUGHT + CALL + SECOND_CALL, functions=FUNCTIONS)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("function_call", None)
    call = choice.message.function_call
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    assert choice.message.tool_calls is None
    assert '"get_weather"' in qwen.prompt()


async def test_a_streamed_call_comes_in_deltas(qwen):
    chunks = await qwen.chunks("Let me look.\n" + CALL, functions=FUNCTIONS, function_call="auto")
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    first, *rest = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert first == {"name": "get_weather", "arguments": ""}
    assert len(rest) > 1
    assert all(piece.keys() == {"arguments"} for piece in rest)
    assert json.loads("".join(piece["arguments"] for piece in rest)) == {"city": "Paris"}
    assert not any("tool_calls" in delta for delta in deltas)
    assert chunks[-1].choices[0].finish_reason == "function_call"


async def test_a_named_function_constrains_the_worker(qwen):
    asked = {"functions": FUNCTIONS, "function_call": {"name": "get_weather"}}
    answer = await qwen.chat('{"city": "Paris"}', **asked)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.function_call.arguments) == {"city": "Paris"}
    schema = qwen.gateway.worker.submits[-1].constraint.json_schema
    assert json.loads(schema) == FUNCTIONS[0]["parameters"]
    chunks = await qwen.chunks('{"city": "Paris"}', **asked)
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_functions_that_must_not_be_called_are_not_in_the_prompt(qwen):
    answer = await qwen.chat("Hello", functions=FUNCTIONS, function_call="none")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello", "stop")
    assert "get_weather" not in qwen.prompt()


async def test_a_call_and_its_result_are_in_the_prompt_as_a_tools_are(qwen):
    called = {"role": "assistant", "content": None, "function_call": {"name": "get_time", "arguments": '{"a": 1}'}}
    result = {"role": "function", "name": "get_time", "content": "Noon"}
    await qwen.chat("x", messages=[*MESSAGES, called, result])
    of_functions = qwen.prompt()
    call = {"id": "call_1", "type": "function", "function": called["function_call"]}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    await qwen.chat("x", messages=[*MESSAGES, called, {"role": "tool", "tool_call_id": "call_1", "content": "Noon"}])
    assert of_functions == qwen.prompt()
    assert "<tool_call>" in of_functions


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{}]}, "functions.0.name"),
        ({"functions": [{"name": "a b"}]}, "functions.0.name"),
        ({"functions": [{"name": "f", "parameters": 5}]}, "functions.0.parameters"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": "required"}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": {"name": "x"}}, "function_call.name"),
        ({"functions": FUNCTIONS, "tools": TOOLS}, "tools"),
        ({"functions": FUNCTIONS, "tool_choice": "required"}, "tool_choice"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": 7}}]},
            "messages.0.function_call.arguments",
        ),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages.0.function_call.name"),
    ],
)
async def test_wrong_functions_are_named(qwen, fields, param):
    async with RawClient.connect(qwen.gateway.port) as client:
        answer = await client.request("POST", "/v1/chat/completions", {"messages": MESSAGES, **fields})
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


async def test_a_schema_that_cannot_be_held_to_is_the_functions_fault(qwen):
    qwen.gateway.worker.refusal = InvalidRequest("too deep", field="constraint.json_schema")
    async with RawClient.connect(qwen.gateway.port) as client:
        body = {"messages": MESSAGES, "functions": FUNCTIONS, "function_call": {"name": "get_time"}}
        answer = await client.request("POST", "/v1/chat/completions", body)
    assert (answer.status, answer.error["param"]) == (400, "functions")


async def test_a_model_of_no_known_format_takes_no_functions(tmp_path):
    async with rig(model_folder(tmp_path / "plain", "{{ messages[0].content }}")) as plain:
        async with RawClient.connect(plain.gateway.port) as client:
            body = {"messages": MESSAGES, "functions": FUNCTIONS}
            answer = await client.request("POST", "/v1/chat/completions", body)
        assert (answer.status, answer.error["param"]) == (400, "functions")
