"""POST, GET, DELETE and cancel of /v1/responses over a scripted generator."""

import asyncio
import json

import pytest
from support.gateway.rest_harness import FakeGenerator, logprob, rest_side, say, until

from baton.gateway.parsing.events import CallArguments, CallEnd, CallStart, ContentText, ReasoningText
from baton.gateway.storage.redis_store import RedisRecordStore
from baton.gateway.storage.store import MemoryRecordStore
from baton.rpc.errors import NoCapacity, Unavailable


async def ask(rest, given="Hi", **fields):
    return await rest.post("/v1/responses", {"input": given, **fields})


async def get(rest, response_id, query=""):
    return await rest.request("GET", f"/v1/responses/{response_id}{query}")


def events_of(answer):
    """The data of each event; its name must be the data's type, and the numbers must go on by one."""
    blocks = answer.body.decode().split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return events


def tell(*events, reason="stop"):
    def script(generation):
        for event in events:
            generation.emit("", events=[event])
        generation.finish(reason=reason)
        generation.done(len(events))

    return script


def texts_of(response):
    return [part["text"] for item in response["output"] for part in item.get("content", ())]


async def test_a_whole_response_has_openais_shape():
    async with rest_side(say("Hel", "lo")) as rest:
        answer = await ask(rest, max_output_tokens=9, metadata={"a": "b"}, instructions="Be kind.")
        (generation,) = rest.generator.started
    body = answer.json
    assert answer.status == 200
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", "storyteller-7m")
    (item,) = body["output"]
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
    }
    num_prompt_tokens = len(generation.request.prompt_token_ids)
    assert body["usage"] == {
        "input_tokens": num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt_tokens + 2,
    }
    assert (body["max_output_tokens"], body["metadata"], body["instructions"]) == (9, {"a": "b"}, "Be kind.")
    assert generation.request.stop.max_tokens == 9


async def test_a_stream_has_openais_events_in_openais_order():
    async with rest_side(say("Hel", "lo")) as rest:
        events = events_of(await ask(rest, stream=True))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["sequence_number"] == 0
    assert events[0]["response"]["status"] == "in_progress"
    assert [event["delta"] for event in events[4:6]] == ["Hel", "lo"]
    assert events[6]["text"] == "Hello"
    assert events[8]["item"] == events[9]["response"]["output"][0]
    assert events[9]["response"]["usage"]["output_tokens"] == 2


PARSED = (
    ReasoningText("Hm."),
    ContentText("Let me see."),
    CallStart(0, "call_1", "weather"),
    CallArguments(0, '{"city": '),
    CallArguments(0, '"Rome"}'),
    CallEnd(0),
)


async def test_reasoning_text_and_calls_are_items_of_their_own():
    async with rest_side(tell(*PARSED, reason="tool_calls")) as rest:
        reasoning, message, call = (await ask(rest)).json["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Let me see."
    assert (call["type"], call["call_id"], call["name"]) == ("function_call", "call_1", "weather")
    assert (call["arguments"], call["status"]) == ('{"city": "Rome"}', "completed")


async def test_a_stream_has_events_of_reasoning_and_calls():
    async with rest_side(tell(*PARSED, reason="tool_calls")) as rest:
        events = events_of(await ask(rest, stream=True))
    assert [(event["output_index"], event["type"].removeprefix("response.")) for event in events[2:-1]] == [
        (0, "output_item.added"),
        (0, "reasoning_part.added"),
        (0, "reasoning_text.delta"),
        (0, "reasoning_text.done"),
        (0, "reasoning_part.done"),
        (0, "output_item.done"),
        (1, "output_item.added"),
        (1, "content_part.added"),
        (1, "output_text.delta"),
        (1, "output_text.done"),
        (1, "content_part.done"),
        (1, "output_item.done"),
        (2, "output_item.added"),
        (2, "function_call_arguments.delta"),
        (2, "function_call_arguments.delta"),
        (2, "function_call_arguments.done"),
        (2, "output_item.done"),
    ]
    assert events[-3]["arguments"] == '{"city": "Rome"}'


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_cut_short_is_incomplete(stream):
    async with rest_side(tell(ContentText("On"), reason="length")) as rest:
        answer = await ask(rest, stream=stream)
    if stream:
        last = events_of(answer)[-1]
        assert last["type"] == "response.incomplete"
    response = last["response"] if stream else answer.json
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_come_with_the_text_where_they_are_included(stream):
    def script(generation):
        assert generation.request.sampling.logprobs == 1
        generation.emit("", logprobs=[logprob("x", -1.0, ("x", -1.0))])
        generation.emit("xy", logprobs=[logprob("y", -0.5, ("y", -0.5))])
        generation.finish()
        generation.done()

    async with rest_side(script) as rest:
        answer = await ask(rest, include=["message.output_text.logprobs"], top_logprobs=1, stream=stream)
    if stream:
        deltas = [event for event in events_of(answer) if event["type"] == "response.output_text.delta"]
        entries = [entry for delta in deltas for entry in delta["logprobs"]]
    else:
        entries = answer.json["output"][0]["content"][0]["logprobs"]
    assert [(entry["token"], entry["logprob"], len(entry["top_logprobs"])) for entry in entries] == [
        ("x", -1.0, 1),
        ("y", -0.5, 1),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_generation_has_its_status(stream):
    generator = FakeGenerator(say("x"))
    generator.refusal = NoCapacity("full")
    async with rest_side(generator=generator) as rest:
        answer = await ask(rest, stream=stream)
        await until(lambda: rest.admission.in_use == 0)
    assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")


async def test_a_failure_after_the_head_is_an_event():
    async with rest_side() as rest:
        waiting = asyncio.create_task(ask(rest, stream=True))
        generation = await rest.generator.next()
        generation.emit("Once")
        generation.sink.on_error(Unavailable("the worker died"))
        last = events_of(await waiting)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the worker died"}
    assert last["response"]["status"] == "failed"


async def test_a_kept_response_can_be_asked_for_and_forgotten():
    async with rest_side(say("Hello")) as rest:
        made = (await ask(rest)).json
        assert (await get(rest, made["id"])).json == made
        gone = await rest.request("DELETE", f"/v1/responses/{made['id']}")
        assert gone.json == {"id": made["id"], "object": "response", "deleted": True}
        for method in ("GET", "DELETE"):
            assert (await rest.request(method, f"/v1/responses/{made['id']}")).status == 404


async def test_a_response_that_is_not_to_be_kept_is_not():
    async with rest_side(say("Hello")) as rest:
        made = (await ask(rest, store=False)).json
        assert (await get(rest, made["id"])).status == 404


async def prompts(rest):
    decode = rest.catalog.get("").tokenizer.decode
    return [decode(generation.request.prompt_token_ids) for generation in rest.generator.started]


async def test_a_response_continues_an_earlier_one():
    async with rest_side(say("Hello")) as rest:
        first = (await ask(rest, "One", instructions="Be kind.")).json
        second = (await ask(rest, "Two", previous_response_id=first["id"])).json
        await ask(rest, "Three", previous_response_id=second["id"], instructions="Be brief.")
        *_, prompt = await prompts(rest)
        listed = (await rest.request("GET", f"/v1/responses/{second['id']}/input_items?order=asc&limit=2")).json
    parts = ["system\nBe brief.", "user\nOne", "assistant\nHello", "user\nTwo", "assistant\nHello", "user\nThree"]
    expected = "".join(f"<|im_start|>{part}<|im_end|>\n" for part in parts)
    assert prompt == f"<|bos|>{expected}<|im_start|>assistant\n"
    assert [item["role"] for item in listed["data"]] == ["user", "assistant"]
    assert listed["has_more"]


async def test_items_are_rendered_by_the_models_template():
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rome?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "Rain"},
    ]
    async with rest_side(say("x")) as rest:
        assert (await ask(rest, items)).status == 200
        (prompt,) = await prompts(rest)
    assert prompt.startswith("<|bos|><|im_start|>developer\nBe kind.<|im_end|>\n<|im_start|>user\nRome?<|im_end|>\n")
    result = "<|im_start|>user\n<tool_response>\nRain\n</tool_response><|im_end|>\n"
    assert prompt.endswith(f"{result}<|im_start|>assistant\n")


@pytest.mark.parametrize(("truncation", "status"), [("auto", 200), ("disabled", 400)])
async def test_a_long_conversation_loses_its_start_where_it_may(truncation, status):
    items = [{"role": "user", "content": f"{index} " * 300} for index in range(12)]
    async with rest_side(say("x")) as rest:
        answer = await ask(rest, items, truncation=truncation)
        assert answer.status == status
        if status == 200:
            (prompt,) = await prompts(rest)
            assert "11 11" in prompt
            assert "<|im_start|>user\n0 0" not in prompt
        else:
            assert answer.error["param"] == "input"
            assert answer.error["code"] == "context_length_exceeded"


async def test_a_response_in_the_background_is_polled_for():
    async with rest_side() as rest:
        made = (await ask(rest, background=True)).json
        assert made["status"] == "queued"
        generation = await rest.generator.next()
        generation.emit("Once")
        assert (await get(rest, made["id"])).json["status"] == "in_progress"
        assert rest.admission.in_use == 1
        generation.finish()
        generation.done()
        await until(lambda: rest.admission.in_use == 0)
        done = (await get(rest, made["id"])).json
    assert (done["status"], texts_of(done)) == ("completed", ["Once"])


async def test_a_response_in_the_background_is_cancelled():
    async with rest_side() as rest:
        made = (await ask(rest, background=True)).json
        generation = await rest.generator.next()
        generation.emit("Once")
        cancelled = (await rest.post(f"/v1/responses/{made['id']}/cancel", {})).json
        assert cancelled["status"] == "cancelled"
        assert generation.aborted.is_set()
        await until(lambda: rest.admission.in_use == 0)
        assert (await get(rest, made["id"])).json["status"] == "cancelled"
        again = await rest.post(f"/v1/responses/{made['id']}/cancel", {})
    assert again.json["status"] == "cancelled"


async def test_a_response_in_the_foreground_cannot_be_cancelled():
    async with rest_side(say("x")) as rest:
        made = (await ask(rest)).json
        assert (await rest.post(f"/v1/responses/{made['id']}/cancel", {})).status == 400


async def test_a_background_stream_is_read_again_from_any_event():
    async with rest_side() as rest:
        waiting = asyncio.create_task(ask(rest, background=True, stream=True))
        generation = await rest.generator.next()
        generation.emit("Once")
        (response_id,) = rest.responses._background
        late = asyncio.create_task(get(rest, response_id, "?stream=true&starting_after=2"))
        generation.emit(" upon")
        generation.finish()
        generation.done()
        all_events, late_events = events_of(await waiting), events_of(await late)
        again = events_of(await get(rest, response_id, "?stream=true"))
        rest_of_it = events_of(await get(rest, response_id, "?stream=true&starting_after=5"))
    assert [event["type"] for event in all_events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert again == all_events
    assert late_events == all_events[3:]
    assert rest_of_it == all_events[6:]


async def test_a_background_response_outlives_its_client():
    async with rest_side() as rest:
        waiting = asyncio.create_task(ask(rest, background=True, stream=True))
        generation = await rest.generator.next()
        generation.emit("Once")
        (response_id,) = rest.responses._background
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        generation.finish()
        generation.done()
        await until(lambda: not rest.responses._background)
        assert (await get(rest, response_id)).json["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_generation(stream):
    async with rest_side() as rest:
        waiting = asyncio.create_task(ask(rest, stream=stream))
        generation = await rest.generator.next()
        generation.emit("Once")
        waiting.cancel()
        await asyncio.wait_for(generation.aborted.wait(), 5)
        await until(lambda: rest.admission.in_use == 0)


MCP_CALL = {"type": "mcp_call", "server_label": "a", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"input": [{"type": "sound"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": 7}]},
            "input.0.arguments",
        ),
        ({"input": [{**MCP_CALL, "error": {"content": 5}}]}, "input.0.error.content"),
        ({"input": [{**MCP_CALL, "error": {"content": [{"text": 7}]}}]}, "input.0.error.content.0.text"),
        ({"input": [{**MCP_CALL, "error": {"message": ["no"]}}]}, "input.0.error.message"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["nothing"]}, "include.0"),
        ({"background": True, "store": False}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"conversation": {}, "input": "Hi"}, "conversation.id"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"stream_options": {"a": 1}}, "stream_options"),
        ({"metadata": {str(index): "x" for index in range(17)}}, "metadata"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "name": "f"}], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice.name",
        ),
        ({"truncation": "some"}, "truncation"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(fields, param):
    async with rest_side(say("x")) as rest:
        answer = await rest.post("/v1/responses", {"input": "Hi", **fields})
        assert rest.admission.in_use == 0
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param


async def test_unknown_ids_are_not_found():
    async with rest_side(say("x")) as rest:
        assert (await get(rest, "resp_none")).status == 404
        assert (await rest.post("/v1/responses/resp_none/cancel", {})).status == 404
        answer = await ask(rest, previous_response_id="resp_none")
    assert (answer.status, answer.error["param"]) == (404, "previous_response_id")


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "after=nothing"])
async def test_wrong_queries_are_refused(query):
    async with rest_side(say("x")) as rest:
        made = (await ask(rest)).json
        answer = await rest.request("GET", f"/v1/responses/{made['id']}/input_items?{query}")
    assert (answer.status, answer.error["param"]) == (400, query.partition("=")[0])


async def test_two_gateways_share_the_records_in_redis(redis_server):
    async with (
        rest_side(say("Hello"), store=RedisRecordStore(redis_server.url, 60)) as one,
        rest_side(store=RedisRecordStore(redis_server.url, 60)) as other,
    ):
        made = (await ask(one)).json
        assert (await get(other, made["id"])).json == made
        waiting = (await ask(other, background=True, previous_response_id=made["id"])).json
        generation = await other.generator.next()
        generation.emit("Once")
        assert (await get(one, waiting["id"])).json["status"] in ("queued", "in_progress")
        cancelled = await one.post(f"/v1/responses/{waiting['id']}/cancel", {})
        assert cancelled.json["status"] == "cancelled"
        assert generation.aborted.is_set()


async def test_a_response_whose_gateway_is_gone_has_failed(redis_server):
    store = RedisRecordStore(redis_server.url, 60)
    async with rest_side(store=RedisRecordStore(redis_server.url, 60)) as other:
        async with rest_side(store=store) as one:
            made = (await ask(one, background=True)).json
            record = await store.load(made["id"])
        await other_store_save(redis_server, made["id"], record)
        answer = (await get(other, made["id"])).json
    assert answer["status"] == "failed"
    assert answer["error"]["code"] == "server_error"


async def other_store_save(redis_server, name, record):
    """Stores the earlier record, without a gateway that runs it."""
    store = RedisRecordStore(redis_server.url, 60)
    await store.save(name, record)
    await store._redis.delete(f"baton:responses:{name}:alive")
    await store.close()


async def test_without_redis_answers_continue_and_stored_responses_are_unavailable(redis_server):
    async with rest_side(say("Hello"), store=RedisRecordStore(redis_server.url, 60)) as rest:
        made = (await ask(rest)).json
        redis_server.stop()
        answer = await get(rest, made["id"])
        assert (answer.status, answer.error["type"]) == (503, "service_unavailable_error")
        assert (await ask(rest, previous_response_id=made["id"])).status == 503
        assert texts_of((await ask(rest)).json) == ["Hello"]
        assert (await ask(rest, background=True)).status == 503
        assert rest.admission.in_use == 0


async def test_memory_is_bounded_and_records_expire():
    now = [0.0]
    store = MemoryRecordStore(10, 100, lambda: now[0])
    for name in "abc":
        await store.save(name, b"x" * 40)
    assert [await store.load(name) is not None for name in "abc"] == [False, True, True]
    assert store.num_bytes == 80
    now[0] = 10.0
    assert await store.load("c") is None
    await store.save("d", b"x")
    assert store.num_bytes == 1
    assert not await store.delete("b")
    assert await store.delete("d")


async def test_the_answers_form_goes_to_the_worker():
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
    async with rest_side(say("{}")) as rest:
        answer = await ask(rest, text={"format": form})
        constraint = rest.generator.started[0].request.constraint
    assert json.loads(constraint.json_schema) == {"type": "object"}
    assert not constraint.lenient
    assert answer.json["text"]["format"]["schema"] == {"type": "object"}
