"""Responses that call a real MCP server, made by the official package, with OpenAI's client."""

import asyncio
import json

import grpc
import openai
import pytest
from support.gateway.access_rig import key_file
from support.gateway.mcp_rig import CALLS_THEN_ANSWERS, RAIN, WEATHER, call, mcp_rig, mcp_server, tool, types_of
from support.gateway.scripted_services import ScriptedWorker, until

from baton.v1.inference_pb2_grpc import InferenceServiceStub
from baton.v1.response_pb2 import GetResponseRequest


async def test_the_model_calls_and_then_answers(rig, url):
    response = await rig.ask(CALLS_THEN_ANSWERS, [tool(url)])
    assert types_of(response.output) == ["mcp_list_tools", "mcp_call", "message"]
    listed, called, _ = response.output
    assert listed.server_label == "weather"
    weather = next(one for one in listed.tools if one.name == "get_weather")
    assert (weather.description, weather.input_schema["required"]) == ("The weather somewhere.", ["city"])
    assert (called.server_label, called.name, json.loads(called.arguments)) == (
        "weather",
        "get_weather",
        {"city": "Paris"},
    )
    assert (called.output, called.error, called.status) == (RAIN, None, "completed")
    assert (response.output_text, response.status) == ("Take an umbrella.", "completed")
    first, second = rig.prompts()
    assert "weather__get_weather" in first
    assert second.startswith(first[:-20])
    assert f"<|im_start|>tool\n{RAIN}" in second
    assert response.usage.input_tokens == sum(len(s.prompt_token_ids) for s in rig.gateway.worker.submits)


async def test_a_stream_has_openais_events(rig, url):
    events = await rig.events(CALLS_THEN_ANSWERS, [tool(url)])
    names = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    once = [name for at, name in enumerate(names) if not at or names[at - 1] != name]
    assert once == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.mcp_list_tools.in_progress",
        "response.mcp_list_tools.completed",
        "response.output_item.done",
        "response.output_item.added",
        "response.mcp_call.in_progress",
        "response.mcp_call_arguments.delta",
        "response.mcp_call_arguments.done",
        "response.mcp_call.completed",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = "".join(event.delta for event in events if event.type == "response.mcp_call_arguments.delta")
    done = next(event for event in events if event.type == "response.mcp_call_arguments.done")
    assert deltas == done.arguments == '{"city": "Paris"}'
    by_index = {event.output_index: event.item for event in events if event.type == "response.output_item.done"}
    assert [by_index[index] for index in range(3)] == events[-1].response.output


async def test_several_rounds_and_calls_in_one(rig, url):
    note = call("weather", "add_note", '{"text": "umbrella"}')
    says = {
        "Question": WEATHER + "\n" + note,
        "added": call("weather", "read_notes"),
        "umbrella;": "",
        "tool\numb": "Ok.",
    }
    response = await rig.ask(says, [tool(url)])
    assert types_of(response.output) == ["mcp_list_tools", "mcp_call", "mcp_call", "mcp_call", "message"]
    assert [item.output for item in response.output[1:4]] == [RAIN, "added", "umbrella"]
    assert len(rig.gateway.worker.submits) == 3


async def test_errors_are_passed_to_the_model(rig, url):
    says = {
        "Question": call("weather", "fail", '{"station": "7"}'),
        "Error": call("weather", "get_weather", '["Paris"]'),
        "JSON object": "I cannot.",
    }
    response = await rig.ask(says, [tool(url)])
    _, failed, wrong, message = response.output
    assert (failed.status, failed.output, failed.error.type) == ("failed", None, "mcp_tool_execution_error")
    assert "Error executing tool fail" in failed.error.content[0]["text"]
    assert (wrong.status, wrong.error.type, wrong.error.code) == ("failed", "mcp_protocol_error", -32602)
    assert message.content[0].text == "I cannot."
    names = [event.type for event in await rig.events(says, [tool(url)])]
    assert names.count("response.mcp_call.failed") == 2
    metrics = (await rig.gateway.get("/metrics")).body.decode()
    assert 'baton_gateway_tool_calls_total{outcome="failed"} 4.0' in metrics
    assert "baton_gateway_tool_call_seconds_count 4.0" in metrics


async def test_long_outputs_are_cut(tmp_path, url):
    says = {"Question": call("weather", "write", '{"num_bytes": 70001}'), "[cut": "Ok."}
    async with mcp_rig(tmp_path, allowed_mcp_servers=(url,), max_tool_output_bytes=301) as rig:
        response = await rig.ask(says, [tool(url)])
    assert response.output[1].output == "é" * 150 + "\n[cut: 70000 bytes, of which 301 are shown]"
    assert response.output_text == "Ok."


async def test_an_output_that_the_context_cannot_hold_fails_the_response(rig, url):
    with pytest.raises(openai.BadRequestError, match="context"):
        await rig.ask({"Question": call("weather", "write", '{"num_bytes": 60000}')}, [tool(url)])


async def test_a_call_that_takes_too_long_fails(tmp_path, url):
    says = {
        "Question": call("weather", "wait", '{"seconds": 60}'),
        "within 0.5 s": WEATHER,
        RAIN: "Done.",
    }
    async with mcp_rig(tmp_path, allowed_mcp_servers=(url,), mcp_timeout=0.5) as rig:
        response = await rig.ask(says, [tool(url)])
    _, waited, called, message = response.output
    assert (waited.status, waited.error.type, waited.error.code) == ("failed", "http_error", 504)
    assert (called.output, message.content[0].text) == (RAIN, "Done.")


async def test_calls_of_one_round_run_at_the_same_time(rig, url):
    says = {"Question": "\n".join([call("weather", "meet")] * 3), "all have come": "Done."}
    response = await rig.ask(says, [tool(url)])
    assert [item.output for item in response.output[1:4]] == ["all have come"] * 3
    assert response.output_text == "Done."


async def test_rounds_are_bounded(tmp_path, url):
    says = {"Question": WEATHER}
    async with mcp_rig(tmp_path, allowed_mcp_servers=(url,), max_tool_rounds=2) as rig:
        response = await rig.ask(says, [tool(url)])
        assert types_of(response.output) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
        assert "get_weather" not in rig.prompts()[2].partition("<|im_start|>user")[0]
        response = await rig.ask(says, [tool(url)], max_tool_calls=1)
        assert types_of(response.output) == ["mcp_list_tools", "mcp_call", "message"]
        twice = await rig.ask({"Question": WEATHER + WEATHER}, [tool(url)], max_tool_calls=1)
        assert [item.status for item in twice.output[1:3]] == ["completed", "failed"]


async def test_all_tokens_of_a_response_count(rig, url):
    response = await rig.ask(CALLS_THEN_ANSWERS, [tool(url)], max_output_tokens=300)
    used = response.usage.output_tokens
    assert response.status == "completed"
    short = await rig.ask(CALLS_THEN_ANSWERS, [tool(url)], max_output_tokens=used - 3)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert short.usage.output_tokens == used - 3
    assert rig.gateway.worker.submits[-1].stop.max_tokens < used - 10


async def test_a_choice_holds_for_the_first_round(rig, url):
    forced = '{"city": "Paris"}'
    choice = {"type": "mcp", "server_label": "weather", "name": "get_weather"}
    response = await rig.ask({"Question": forced, RAIN: "Ok."}, [tool(url)], tool_choice=choice)
    assert types_of(response.output) == ["mcp_list_tools", "mcp_call", "message"]
    first, second = rig.gateway.worker.submits
    assert first.constraint.json_schema
    assert not second.HasField("constraint")


async def test_allowed_tools_and_the_clients_own(rig, url):
    own = {"type": "function", "name": "open_umbrella", "parameters": {"type": "object", "properties": {}}}
    says = {"Question": WEATHER + '\n<tool_call>{"name": "open_umbrella", "arguments": {}}</tool_call>'}
    response = await rig.ask(says, [tool(url, allowed_tools=["get_weather"]), own])
    assert types_of(response.output) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert response.output[1].output == RAIN
    (prompt,) = rig.prompts()
    assert "weather__get_weather" in prompt
    assert "weather__fail" not in prompt
    answer = {"type": "function_call_output", "call_id": response.output[2].call_id, "output": "open"}
    says = {"open": "Good."}
    after = await rig.ask(says, [tool(url), own], previous_response_id=response.id, input=[answer])
    assert types_of(after.output) == ["message"]  # the tools are listed in the conversation
    assert f"tool\n{RAIN}" in rig.prompts()[-1]


async def test_a_server_that_does_not_answer_fails_the_request(tmp_path):
    dead = "http://127.0.0.1:9/mcp"
    async with mcp_rig(tmp_path, allowed_mcp_servers=(dead,)) as rig:
        with pytest.raises(openai.APIStatusError, match="cannot connect") as failed:
            await rig.ask({"Question": "x"}, [tool(dead)])
    assert (failed.value.status_code, failed.value.type) == (424, "external_connector_error")


async def test_a_response_in_the_background_is_cancelled_during_a_call(rig, url):
    says = {"Question": call("weather", "wait", '{"seconds": 60}')}
    made = await rig.ask(says, [tool(url)], background=True)
    for _ in range(500):
        found = await rig.client.responses.retrieve(made.id)
        if len(rig.gateway.worker.submits) == 1 and found.status == "in_progress":
            break
        await asyncio.sleep(0.01)
    cancelled = await rig.client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    ended = await rig.client.responses.retrieve(made.id)
    assert [item.status for item in ended.output if item.type == "mcp_call"] in ([], ["incomplete"])


async def test_a_client_that_leaves_ends_the_calls(rig, url):
    says = {"Question": call("weather", "wait", '{"seconds": 60}')}
    stream = await rig.ask(says, [tool(url)], stream=True)
    async for event in stream:
        if event.type == "response.mcp_call_arguments.done":
            break
    await stream.close()

    async def in_use():
        return (await rig.gateway.get("/load")).json

    for _ in range(500):
        if (await in_use())["server_load"] == 0:
            break
        await asyncio.sleep(0.01)
    assert (await in_use())["server_load"] == 0


async def test_each_round_survives_a_workers_death(rig, url):
    rig.says = CALLS_THEN_ANSWERS
    first = rig.gateway.worker
    async with ScriptedWorker("w2", first.script) as second:
        rig.gateway.router.workers.append(second)
        first.break_after_tokens = 3
        response = await rig.ask(CALLS_THEN_ANSWERS, [tool(url)])
        await until(lambda: second.submits)
    assert types_of(response.output) == ["mcp_list_tools", "mcp_call", "message"]
    assert (response.output[1].output, response.output_text) == (RAIN, "Take an umbrella.")
    assert any(submit.resume.output_token_ids for submit in second.submits)


async def test_grpc_clients_get_the_rest_of_the_response(rig, url):
    made = await rig.ask(CALLS_THEN_ANSWERS, [tool(url)])
    async with grpc.aio.insecure_channel(rig.gateway.config.grpc_listen) as channel:
        found = await InferenceServiceStub(channel).GetResponse(GetResponseRequest(response_id=made.id))
    listed, called, message = found.response.output
    assert [item.WhichOneof("item") for item in (listed, called, message)] == [None, None, "message"]
    assert (called.id, message.message.text) == (made.output[1].id, "Take an umbrella.")


async def test_servers_that_speak_sse_are_called_as_vllm_calls_them(tmp_path):
    says = {"Question": call("127_0_0_1", "get_weather", '{"city": "Paris"}'), RAIN: "Ok."}
    with mcp_server("sse", "sse") as url:
        async with mcp_rig(tmp_path, tool_server=(url.split("/")[2],)) as rig:
            response = await rig.ask(says, [{"type": "mcp", "server_label": "127_0_0_1"}])
    assert (response.output[1].output, response.output_text) == (RAIN, "Ok.")


async def test_each_round_counts_for_the_tenants_limits(tmp_path, url):
    tenants = {"one": {"requests_per_minute": 1}, "single": {"concurrent_requests": 1}}
    path, (one, single) = key_file(tmp_path, [{"tenant": name} for name in tenants], tenants)
    async with mcp_rig(tmp_path, allowed_mcp_servers=(url,), api_keys=str(path)) as rig:
        rig.client.api_key = single
        for _ in range(2):
            assert (await rig.ask(CALLS_THEN_ANSWERS, [tool(url)])).output_text == "Take an umbrella."
        rig.client.api_key = one
        events = await rig.events(CALLS_THEN_ANSWERS, [tool(url)])
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "rate_limit_exceeded"
    assert [item.status for item in events[-1].response.output if item.type == "mcp_call"] == ["completed"]
