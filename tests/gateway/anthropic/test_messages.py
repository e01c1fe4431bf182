"""POST /v1/messages over a scripted generator: bodies, events, errors as Anthropic's API has them."""

import asyncio
import json

import pytest
from support.gateway.rest_harness import FakeGenerator, rest_side, say

from baton.gateway.parsing.events import CallArguments, CallEnd, CallStart, ContentText, ReasoningText
from baton.rpc.errors import InternalError, InvalidRequest, NoCapacity, Unavailable

BODY = {"model": "storyteller-7m", "max_tokens": 32, "messages": [{"role": "user", "content": "Hi"}]}


async def ask(rest, path="/v1/messages", headers=None, **fields):
    body = {name: value for name, value in {**BODY, **fields}.items() if value is not None}
    return await rest.post(path, body, headers)


def events_of(answer):
    """(name, data) of each event; the name must be the data's type."""
    blocks = answer.body.decode().split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert events[-1][0] == events[-1][1]["type"]
    return events


def tell(*events, reason="stop", stop_reason=None):
    """One answer of these parsed events."""

    def script(generation):
        for event in events:
            generation.emit("", events=[event])
        generation.finish(reason=reason, stop_reason=stop_reason)
        generation.done(len(events))

    return script


async def test_a_whole_answer_has_anthropics_shape():
    async with rest_side(say("Hel", "lo")) as rest:
        answer = await ask(rest)
    body = answer.json
    assert answer.status == 200
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert body.pop("id").startswith("msg_")
    num_prompt_tokens = body["usage"].pop("input_tokens")
    assert num_prompt_tokens > 3
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "storyteller-7m",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 2,
            "output_tokens_details": None,
            "service_tier": "standard",
        },
    }


async def test_a_stream_has_anthropics_events_in_anthropics_order():
    async with rest_side(say("Hel", "lo")) as rest:
        answer = await ask(rest, stream=True)
    events = events_of(answer)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [name for name, _ in events] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    data = [one for _, one in events]
    assert data[0]["message"]["content"] == []
    assert data[0]["message"]["stop_reason"] is None
    assert data[0]["message"]["usage"]["output_tokens"] == 0
    assert data[1]["content_block"] == {"type": "text", "text": ""}
    assert [one["delta"] for one in data[3:5]] == [
        {"type": "text_delta", "text": "Hel"},
        {"type": "text_delta", "text": "lo"},
    ]
    assert data[6]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert data[6]["usage"]["output_tokens"] == 2


async def test_cached_tokens_are_separate_from_input_tokens():
    def script(generation):
        generation.emit("x")
        generation.finish()
        generation.done(1, cached_tokens=3)

    async with rest_side(script) as rest:
        usage = (await ask(rest)).json["usage"]
        (generation,) = rest.generator.started
    assert usage["cache_read_input_tokens"] == 3
    assert usage["input_tokens"] + 3 == len(generation.request.prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "stop_reason", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("stop", 5, ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
    ],
)
async def test_the_stop_reason_is_the_cause_of_the_end(stream, reason, stop_reason, expected):
    def script(generation):
        generation.emit("x")
        generation.finish(reason=reason, stop_reason=stop_reason)
        generation.done(32)

    async with rest_side(script) as rest:
        answer = await ask(rest, stream=stream, stop_sequences=["END"])
        assert list(rest.generator.started[0].request.stop.stop) == ["END"]
    end = events_of(answer)[-2][1]["delta"] if stream else answer.json
    assert (end["stop_reason"], end["stop_sequence"]) == expected


async def test_a_full_context_is_a_stop_reason():
    async with rest_side(tell(ContentText("x"), reason="length")) as rest:
        assert (await ask(rest)).json["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_and_calls_are_blocks_of_their_own(stream):
    script = tell(
        ReasoningText("Hm"),
        ReasoningText("m."),
        ContentText("Let me see."),
        CallStart(0, "call_1", "weather"),
        CallArguments(0, '{"city": '),
        CallArguments(0, '"Rome"}'),
        CallEnd(0),
        reason="tool_calls",
    )
    async with rest_side(script) as rest:
        answer = await ask(rest, stream=stream)
    if not stream:
        thinking, text, call = answer.json["content"]
        assert thinking["thinking"] == "Hmm."
        assert thinking["signature"]
        assert text == {"type": "text", "text": "Let me see."}
        assert call == {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
        assert answer.json["stop_reason"] == "tool_use"
        return
    events = [data for name, data in events_of(answer) if name.startswith("content_block")]
    shown = [(event["index"], event.get("delta", event.get("content_block", {})).get("type")) for event in events]
    assert shown == [
        (0, "thinking"),
        (0, "thinking_delta"),
        (0, "thinking_delta"),
        (0, "signature_delta"),
        (0, None),
        (1, "text"),
        (1, "text_delta"),
        (1, None),
        (2, "tool_use"),
        (2, "input_json_delta"),
        (2, "input_json_delta"),
        (2, None),
    ]
    assert "".join(event["delta"]["partial_json"] for event in events[-3:-1]) == '{"city": "Rome"}'


async def test_arguments_that_are_no_object_are_kept_as_text():
    script = tell(CallStart(0, "call_1", "f"), CallArguments(0, "[1"), CallEnd(0), reason="tool_calls")
    async with rest_side(script) as rest:
        assert (await ask(rest)).json["content"][0]["input"] == {"input": "[1"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (Unavailable("no worker"), 529, "overloaded_error"),
        (NoCapacity("full"), 429, "rate_limit_error"),
        (InternalError("broken"), 500, "api_error"),
        (ValueError("a defect"), 500, "api_error"),
    ],
)
async def test_a_refused_generation_has_anthropics_status_and_type(stream, refusal, status, kind):
    generator = FakeGenerator(say("x"))
    generator.refusal = refusal
    async with rest_side(generator=generator) as rest:
        answer = await ask(rest, stream=stream)
        assert rest.admission.in_use == 0
    assert answer.status == status
    assert answer.json["type"] == "error"
    assert answer.error["type"] == kind
    assert answer.json["request_id"] == answer.headers["request-id"]
    assert ("retry-after" in answer.headers) == (status in (429, 529))


async def test_a_failure_after_the_head_is_an_error_event():
    async with rest_side() as rest:
        waiting = asyncio.create_task(ask(rest, stream=True))
        generation = await rest.generator.next()
        generation.emit("Once")
        generation.sink.on_error(Unavailable("the worker died"))
        events = events_of(await waiting)
    assert events[-1][0] == "error"
    assert events[-1][1]["error"] == {"type": "overloaded_error", "message": "the worker died"}


TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}]}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "ok"}]}
USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("name", ["no such tool!", "f.g", "né", "x" * 200])
async def test_an_invented_tool_name_is_accepted_in_the_history(name):
    call = {"role": "assistant", "content": [{**CALL["content"][0], "name": name}]}
    async with rest_side(say("ok")) as rest:
        answer = await ask(rest, messages=[USER, call, RESULT])
    assert answer.status == 200, answer.json


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, "messages.0.content.0"),
        ({"messages": [USER, CALL]}, "messages.1"),
        ({"messages": [USER, CALL, USER]}, "messages.1"),
        ({"messages": [USER, RESULT]}, "messages.1"),
        ({"messages": [USER, {"role": "assistant", "content": "So "}]}, "messages.1"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "messages.1"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop_sequences": [" "]}, "stop_sequences.0"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking.budget_tokens"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        (
            {"tools": [{"name": "f", "type": "web_search_20250305"}], "tool_choice": {"type": "any"}},
            "tool_choice",
        ),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(fields, named):
    async with rest_side(say("x")) as rest:
        answer = await ask(rest, **fields)
        if answer.status == 200:
            pytest.fail(f"{fields} was served")
        assert rest.admission.in_use == 0
    assert answer.status == 400, answer.body
    assert answer.error["type"] == "invalid_request_error"
    assert named in answer.error["message"]


async def test_an_unknown_model_is_not_found():
    async with rest_side(say("x")) as rest:
        answer = await ask(rest, model="claude-9")
    assert (answer.status, answer.error["type"]) == (404, "not_found_error")
    assert "claude-9" in answer.error["message"]


async def test_errors_before_any_route_have_anthropics_form_too():
    async with rest_side(say("x")) as rest:
        wrong_method = await rest.request("GET", "/v1/messages")
        unknown = await rest.post("/v1/messages/nothing", {})
        broken = await rest.post("/v1/messages", b"{")
    assert (wrong_method.status, wrong_method.error["type"]) == (405, "invalid_request_error")
    assert (unknown.status, unknown.error["type"]) == (404, "not_found_error")
    assert (broken.status, broken.error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("version", "status"), [("2023-06-01", 200), ("2026-10-21", 200), ("2019-01-01", 400), ("newest", 400)]
)
async def test_the_version_is_checked_where_it_is_given(version, status):
    async with rest_side(say("x")) as rest:
        answer = await ask(rest, headers={"anthropic-version": version, "x-api-key": "any"})
    assert answer.status == status
    if status == 400:
        assert "anthropic-version" in answer.error["message"]


async def prompt_of(**fields):
    async with rest_side(say("x")) as rest:
        answer = await ask(rest, **fields)
        assert answer.status == 200, answer.body
        (generation,) = rest.generator.started
        return rest.catalog.get("").tokenizer.decode(generation.request.prompt_token_ids)


async def test_a_conversation_is_rendered_by_the_models_template():
    prompt = await prompt_of(
        system=[{"type": "text", "text": "Be kind."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]},
            {
                "role": "assistant",
                "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "A"}],
            },
            {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "A page."}}]},
        ],
    )
    parts = ["system\nBe kind.", "user\nOne\nTwo", "assistant\nA", "user\nA page.", "assistant\n"]
    assert (
        prompt
        == "<|bos|>" + "".join(f"<|im_start|>{part}<|im_end|>\n" for part in parts[:-1]) + "<|im_start|>assistant\n"
    )


async def test_results_of_calls_are_messages_of_their_own():
    prompt = await prompt_of(
        messages=[USER, CALL, {**RESULT, "content": [*RESULT["content"], {"type": "text", "text": "So?"}]}]
    )
    result = "<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n"
    assert prompt.endswith(f"{result}<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n")


async def test_an_answer_continues_a_final_assistant_message():
    prompt = await prompt_of(messages=[USER, {"role": "assistant", "content": "Once upon"}])
    assert prompt.endswith("<|im_start|>assistant\nOnce upon")


async def test_tokens_are_counted_as_messages_would_have_them():
    async with rest_side(say("x")) as rest:
        counted = await ask(rest, "/v1/messages/count_tokens", max_tokens=None)
        await ask(rest)
        num_tokens = len(rest.generator.started[0].request.prompt_token_ids)
    assert counted.json == {"input_tokens": num_tokens, "context_management": {"original_input_tokens": num_tokens}}


async def test_a_chat_that_is_too_long_is_refused():
    async with rest_side(say("x")) as rest:
        answer = await ask(rest, messages=[{"role": "user", "content": "word " * 3000}])
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert "messages" in answer.error["message"]


async def test_a_client_that_leaves_ends_the_generation():
    async with rest_side() as rest:
        waiting = asyncio.create_task(ask(rest, stream=True))
        generation = await rest.generator.next()
        generation.emit("Once")
        waiting.cancel()
        await asyncio.wait_for(generation.aborted.wait(), 5)
        assert rest.admission.in_use == 0


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


async def test_the_answers_form_goes_to_the_worker():
    async with rest_side(say("{}")) as rest:
        assert (await ask(rest, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})).status == 200
        constraint = rest.generator.started[0].request.constraint
    assert json.loads(constraint.json_schema) == SCHEMA


async def test_an_error_of_a_worker_names_the_clients_field():
    generator = FakeGenerator(say("x"))
    generator.refusal = InvalidRequest(
        "response_format.json_schema.schema is bad", field="response_format.json_schema.schema"
    )
    async with rest_side(generator=generator) as rest:
        answer = await ask(rest, output_config={"format": {"type": "json_schema", "schema": {}}})
    assert (answer.status, answer.error["message"]) == (400, "output_config.format.schema is bad")
