"""A forced call that the token limit cuts at any token: every API shows a part of the call or nothing, never markup."""

import json

import pytest
from support.gateway.rest_harness import RawClient
from support.gateway.scripted_gateway import model_folder
from support.gateway.tools_rig import MESSAGES, NAME, QWEN, TOOLS, rig

SAYS = '[{"name": "get_weather", "parameters": {"city": "Par]is"}}, {"name": "get_time", "parameters": {}}]'
NAMED_SAYS = '{"city": "Par]is"}'
WHOLE = [("get_weather", '{"city": "Par]is"}'), ("get_time", "{}")]


@pytest.fixture
async def qwen(tmp_path):
    async with rig(model_folder(tmp_path / "qwen", QWEN)) as made:
        made.gateway.worker.step_seconds = 0.0
        yield made


def check(content, calls, whole=WHOLE):
    """Nothing but the begin of the calls."""
    assert not content
    for shown, expected in zip(calls, whole, strict=False):
        assert shown[0] == expected[0]
        assert expected[1].startswith(shown[1])
    assert all(shown == expected for shown, expected in zip(calls[:-1], whole, strict=False))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_chats(qwen, choice):
    says, whole = (SAYS, WHOLE) if choice == "required" else (NAMED_SAYS, WHOLE[:1])
    qwen.says = says
    fields = {"tools": TOOLS, "tool_choice": choice}
    for max_tokens in range(1, len(qwen.token_ids)):
        (answer,) = (await qwen.chat(says, max_tokens=max_tokens, **fields)).choices
        assert answer.finish_reason == "length"
        calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or ()]
        check(answer.message.content, calls, whole)
        content, streamed = "", []
        for chunk in await qwen.chunks(says, max_tokens=max_tokens, **fields):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for call in delta.tool_calls or ():
                if call.id:
                    streamed.append((call.function.name, ""))
                name, arguments = streamed[call.index]
                streamed[call.index] = (name, arguments + call.function.arguments)
        assert (content, streamed) == (answer.message.content or "", calls)


@pytest.mark.parametrize("stream", [False, True])
async def test_messages(qwen, stream):
    qwen.says = SAYS
    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"] | {"type": "object"}}
        for tool in TOOLS
    ]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": {"type": "any"}, "stream": stream}
    for max_tokens in range(1, len(qwen.token_ids)):
        answer = await _post(qwen, "/v1/messages", {**body, "model": NAME, "max_tokens": max_tokens})
        if not stream:
            assert answer.json["stop_reason"] == "max_tokens"
            assert all(block["type"] == "tool_use" for block in answer.json["content"])
            continue
        events = _events(answer)
        starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert all(block["type"] == "tool_use" or not block["text"] for block in starts)
        assert all(delta["type"] == "input_json_delta" for delta in deltas)


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(qwen, stream):
    qwen.says = SAYS
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"input": "Hi", "tools": tools, "tool_choice": "required", "stream": stream}
    for max_tokens in range(1, len(qwen.token_ids)):
        answer = await _post(qwen, "/v1/responses", {**body, "max_output_tokens": max_tokens})
        events = _events(answer) if stream else []
        assert not any(event["type"] == "response.output_text.delta" for event in events)
        response = events[-1]["response"] if stream else answer.json
        assert response["status"] == "incomplete"
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        check("", [(item["name"], item["arguments"]) for item in calls])
        texts = [item for item in response["output"] if item["type"] == "message"]
        assert not any(part["text"] for item in texts for part in item["content"])


async def _post(rig, path, body):
    async with RawClient.connect(rig.gateway.port) as client:
        answer = await client.request("POST", path, body)
    assert answer.status == 200
    return answer


def _events(answer):
    lines = [line.removeprefix("data: ") for line in answer.body.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
