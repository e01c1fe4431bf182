"""Responses over the public gRPC API and REST with the same store: a scripted generator and a real client."""

import asyncio
import json

import grpc
import redis.asyncio as redis
from support.gateway.responses_rig import HI, asked, both_sides, create, get, item, refused, watch
from support.gateway.rest_harness import FakeGenerator, logprob, say, until

from baton.gateway.grpc.responses.messages import event_of
from baton.gateway.parsing.events import CallArguments, CallEnd, CallStart, ContentText, ReasoningText
from baton.gateway.storage.redis_store import RedisRecordStore
from baton.rpc.errors import NoCapacity, Unavailable
from baton.v1 import response_pb2, types_pb2


def kinds(events):
    return [event.WhichOneof("event") for event in events]


def tell(*events, reason="stop"):
    def script(generation):
        for event in events:
            generation.emit("", events=[event])
        generation.finish(reason=reason)
        generation.done(len(events))

    return script


async def test_a_response_streams_and_both_apis_find_it():
    async with both_sides(say("Hel", "lo")) as (rest, stub):
        events = await create(stub, metadata={"a": "b"}, instructions="Be kind.")
        made = events[-1].response
        assert await get(stub, made.id) == made
        told = (await rest.request("GET", f"/v1/responses/{made.id}")).json
    assert kinds(events) == ["response", "response", "item_added", "text", "text", "item_done", "response"]
    assert [event.text.text for event in events[3:5]] == ["Hel", "lo"]
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))
    assert events[0].response.status == response_pb2.RESPONSE_STATUS_IN_PROGRESS
    assert made.status == response_pb2.RESPONSE_STATUS_COMPLETED
    (item,) = made.output
    assert (item.message.role, item.message.text) == ("assistant", "Hello")
    assert item == events[-2].item_done.item
    assert (made.usage.output_tokens, dict(made.metadata), made.instructions) == (2, {"a": "b"}, "Be kind.")
    assert (told["id"], told["output"][0]["content"][0]["text"], told["metadata"]) == (made.id, "Hello", {"a": "b"})


async def test_reasoning_and_calls_are_items_of_their_own():
    parts = (
        ReasoningText("Hm."),
        ContentText("Let me see."),
        CallStart(0, "call_1", "weather"),
        CallArguments(0, '{"city": '),
        CallArguments(0, '"Rome"}'),
        CallEnd(0),
    )
    async with both_sides(tell(*parts, reason="tool_calls")) as (_, stub):
        events = await create(stub)
    reasoning, message, call = events[-1].response.output
    assert (reasoning.reasoning.text, message.message.text) == ("Hm.", "Let me see.")
    assert (call.function_call.call_id, call.function_call.name) == ("call_1", "weather")
    assert call.function_call.arguments == '{"city": "Rome"}'
    pieces = [event.arguments for event in events if event.HasField("arguments")]
    assert [(piece.output_index, piece.text) for piece in pieces] == [(2, '{"city": '), (2, '"Rome"}')]
    assert [event.reasoning.text for event in events if event.HasField("reasoning")] == ["Hm."]


async def test_the_requests_fields_reach_the_generation():
    async with both_sides(say("x")) as (rest, stub):
        sampling = types_pb2.SamplingParams(
            temperature=0.5,
            seed=2**64 - 1,
            top_k=3,
            logit_bias_token_ids=[7],
            logit_bias_values=[-1.5],
            bad_words=["a"],
        )
        stop = types_pb2.StopConditions(max_tokens=9, min_tokens=2, stop=["END"], ignore_eos=True)
        constraint = types_pb2.Constraint(regex="[0-9]+")
        await create(stub, sampling=sampling, stop=stop, constraint=constraint, cache_salt="mine", priority=3)
        (generation,) = rest.generator.started
    request = generation.request
    assert request.sampling == sampling
    assert (request.stop.max_tokens, request.stop.min_tokens, list(request.stop.stop)) == (9, 2, ["END"])
    assert request.stop.ignore_eos
    assert (request.constraint.regex, request.cache_salt, request.priority) == ("[0-9]+", "mine", 3)


async def test_conversations_continue_across_both_apis():
    async with both_sides(say("Hello")) as (rest, stub):
        first = (await rest.post("/v1/responses", {"input": "One"})).json
        two = item(message=response_pb2.ItemMessage(role="user", text="Two"))
        second = (await create(stub, two, previous_response_id=first["id"]))[-1].response
        await rest.post("/v1/responses", {"input": "Three", "previous_response_id": second.id})
        decode = rest.catalog.get("").tokenizer.decode
        prompt = decode(rest.generator.started[-1].request.prompt_token_ids)
        listed = await stub.ListResponseInput(
            response_pb2.ListResponseInputRequest(
                response_id=second.id, limit=2, order=response_pb2.ITEM_ORDER_OLDEST_FIRST
            )
        )
        after = await stub.ListResponseInput(
            response_pb2.ListResponseInputRequest(
                response_id=second.id, after=listed.items[-1].id, order=response_pb2.ITEM_ORDER_OLDEST_FIRST
            )
        )
    parts = ["user\nOne", "assistant\nHello", "user\nTwo", "assistant\nHello", "user\nThree"]
    expected = "".join(f"<|im_start|>{part}<|im_end|>\n" for part in parts)
    assert prompt == f"<|bos|>{expected}<|im_start|>assistant\n"
    assert [item.message.text for item in listed.items] == ["One", "Hello"]
    assert [item.message.text for item in after.items] == ["Two"]
    assert (listed.has_more, after.has_more) == (True, False)


async def test_a_calls_result_is_answered():
    items = [
        HI,
        item(reasoning=response_pb2.ItemReasoning(text="Hm.")),
        item(function_call=response_pb2.ItemFunctionCall(call_id="c", name="weather")),
        item(function_output=response_pb2.ItemFunctionOutput(call_id="c", output="Rain")),
    ]
    async with both_sides(say("x")) as (rest, stub):
        await create(stub, *items)
        decode = rest.catalog.get("").tokenizer.decode
        prompt = decode(rest.generator.started[0].request.prompt_token_ids)
    result = "<tool_response>\nRain\n</tool_response>"
    assert prompt.endswith(f"<|im_start|>user\n{result}<|im_end|>\n<|im_start|>assistant\n")


async def test_log_probabilities_come_with_the_text():
    def script(generation):
        assert generation.request.sampling.logprobs == 1
        generation.emit("é", logprobs=[logprob("é", -1.0, ("é", -1.0))])
        generation.finish()
        generation.done()

    async with both_sides(script) as (_, stub):
        events = await create(stub, sampling=types_pb2.SamplingParams(logprobs=1))
    (delta,) = (event.text for event in events if event.HasField("text"))
    (entry,) = delta.logprobs
    assert (entry.token, entry.logprob, entry.utf8, entry.top[0].token) == ("é", -1.0, "é".encode(), "é")
    assert list(events[-1].response.output[0].message.logprobs) == [entry]


async def test_a_response_in_the_background_outlives_its_call_and_is_watched():
    async with both_sides() as (rest, stub):
        call = stub.CreateResponse(asked(background=True), timeout=20)
        first = (await call.read()).event
        assert first.response.status == response_pb2.RESPONSE_STATUS_QUEUED
        call.cancel()
        response_id = first.response.id
        generation = await rest.generator.next()
        generation.emit("Once")
        watching = asyncio.create_task(watch(stub, response_id))
        late = asyncio.create_task(watch(stub, response_id, starting_after=3))
        generation.emit(" upon")
        generation.finish()
        generation.done()
        events, last_events = await watching, await late
        await until(lambda: not rest.responses._background)
        again = await watch(stub, response_id)
        over_rest = (await rest.request("GET", f"/v1/responses/{response_id}?stream=true")).body
    assert "".join(event.text.text for event in events) == "Once upon"
    assert events[-1].response.status == response_pb2.RESPONSE_STATUS_COMPLETED
    assert again == events
    assert last_events == [event for event in events if event.sequence_number > 3]
    assert rest.admission.in_use == 0
    assert f'"sequence_number":{events[-1].sequence_number}}}'.encode() in over_rest


async def test_a_response_in_the_background_is_cancelled():
    async with both_sides() as (rest, stub):
        call = stub.CreateResponse(asked(background=True), timeout=20)
        response_id = (await call.read()).event.response.id
        generation = await rest.generator.next()
        generation.emit("Once")
        request = response_pb2.CancelResponseRequest(response_id=response_id)
        cancelled = (await stub.CancelResponse(request)).response
        assert cancelled.status == response_pb2.RESPONSE_STATUS_CANCELLED
        assert generation.aborted.is_set()
        events = []
        while (answer := await call.read()) is not grpc.aio.EOF:
            events.append(answer.event)
        await until(lambda: rest.admission.in_use == 0)
        await until(lambda: not rest.responses._background)
        assert (await get(stub, response_id)).status == response_pb2.RESPONSE_STATUS_CANCELLED
        assert (await watch(stub, response_id))[-1] == events[-1]
    assert events[-1].response.status == response_pb2.RESPONSE_STATUS_CANCELLED


async def test_a_response_in_the_foreground_is_neither_cancelled_nor_watched():
    async with both_sides(say("x")) as (_, stub):
        made = (await create(stub))[-1].response
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "background"):
            await stub.CancelResponse(response_pb2.CancelResponseRequest(response_id=made.id))
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "response_id"):
            await watch(stub, made.id)


async def test_a_client_that_leaves_ends_the_generation():
    async with both_sides() as (rest, stub):
        call = stub.CreateResponse(asked(), timeout=20)
        reading = asyncio.create_task(call.read())
        generation = await rest.generator.next()
        generation.emit("Once")
        await reading
        call.cancel()
        await asyncio.wait_for(generation.aborted.wait(), 10)
        await until(lambda: rest.admission.in_use == 0)


async def test_a_slow_client_holds_its_generation_back():
    async with both_sides() as (rest, stub):
        call = stub.CreateResponse(asked(), timeout=60)
        generation = await rest.generator.next()
        while generation.sink.writable:
            generation.emit("Once upon a time " * 4096)
            await asyncio.sleep(0)
        generation.finish()
        generation.done()
        text = "".join([answer.event.text.text async for answer in call])
        assert generation.resumed.is_set()
    assert text.startswith("Once upon a time Once")


async def test_deleted_and_unstored_responses_are_not_found():
    async with both_sides(say("x")) as (rest, stub):
        made = (await create(stub))[-1].response
        assert made.stored
        await stub.DeleteResponse(response_pb2.DeleteResponseRequest(response_id=made.id))
        with refused(grpc.StatusCode.NOT_FOUND, "response_id"):
            await get(stub, made.id)
        unkept = (await create(stub, do_not_store=True))[-1].response
        assert not unkept.stored
        assert (await rest.request("GET", f"/v1/responses/{unkept.id}")).status == 404


async def test_other_tenants_responses_are_not_there():
    async with both_sides(say("x"), tenant="acme") as (rest, stub):
        mine = (await create(stub))[-1].response
        theirs = (await rest.post("/v1/responses", {"input": "Hi"})).json
        assert (await rest.request("GET", f"/v1/responses/{mine.id}")).status == 404
        with refused(grpc.StatusCode.NOT_FOUND, "response_id"):
            await get(stub, theirs["id"])
        with refused(grpc.StatusCode.NOT_FOUND, "previous_response_id"):
            await create(stub, previous_response_id=theirs["id"])


async def test_a_refused_generation_has_its_status():
    generator = FakeGenerator(say("x"))
    generator.refusal = NoCapacity("full")
    async with both_sides(generator=generator) as (rest, stub):
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
            await create(stub)
        await until(lambda: rest.admission.in_use == 0)


async def test_a_failure_in_between_is_an_event_and_the_status():
    async with both_sides() as (rest, stub):
        call = stub.CreateResponse(asked(), timeout=20)
        generation = await rest.generator.next()
        generation.emit("Once")
        generation.sink.on_error(Unavailable("the worker died"))
        events = []
        with refused(grpc.StatusCode.UNAVAILABLE):
            async for answer in call:
                events.append(answer.event)
    failed = events[-1].response
    assert failed.status == response_pb2.RESPONSE_STATUS_FAILED
    assert failed.error.code == response_pb2.RESPONSE_ERROR_CODE_SERVER_ERROR
    assert failed.error.message == "the worker died"


async def test_a_long_conversation_loses_its_start_where_it_may():
    items = [item(message=response_pb2.ItemMessage(role="user", text=f"{index} " * 300)) for index in range(12)]
    async with both_sides(say("x")) as (rest, stub):
        await create(stub, *items, truncate_conversation=True)
        prompt = rest.catalog.get("").tokenizer.decode(rest.generator.started[0].request.prompt_token_ids)
    assert "11 11" in prompt
    assert "<|im_start|>user\n0 0" not in prompt


async def test_items_kept_by_rest_clients_may_have_any_content():
    odd = {"role": "user", "status": "odd", "content": [{"type": "input_text", "text": "x", "logprobs": 5}]}
    async with both_sides(say("x")) as (rest, stub):
        made = (await rest.post("/v1/responses", {"input": [odd]})).json
        listed = await stub.ListResponseInput(response_pb2.ListResponseInputRequest(response_id=made["id"]))
    assert [(one.message.text, one.status) for one in listed.items] == [("x", 0)]


async def test_two_gateways_share_the_records_in_redis_until_they_expire(redis_server):
    store, other_store = (RedisRecordStore(redis_server.url, 60) for _ in range(2))
    async with both_sides(say("x"), store=store) as (_, stub), both_sides(store=other_store) as (_, other_stub):
        made = (await create(stub))[-1].response
        assert await get(other_stub, made.id) == made
        client = redis.from_url(redis_server.url)
        key = f"baton:responses:{made.id}"
        assert 0 < await client.ttl(key) <= 60
        await client.expire(key, 0)
        await client.aclose()
        for one in (stub, other_stub):
            with refused(grpc.StatusCode.NOT_FOUND, "response_id"):
                await get(one, made.id)


def test_events_are_sent_once_in_either_format():
    part = {"type": "response.content_part.added", "sequence_number": 3, "part": {}}
    assert event_of(f"event: {part['type']}\ndata: {json.dumps(part)}\n\n") is None
