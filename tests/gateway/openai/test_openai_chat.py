"""Chats over REST with a scripted generator: both forms of the answer, field by field."""

import asyncio

import msgspec
import pytest
from support.gateway.rest_harness import RawClient, logprob, request_bytes, rest_side, say, until

from baton.gateway.schemas import answers
from baton.rpc.errors import InvalidRequest, NoCapacity, Unavailable

PATH = "/v1/chat/completions"


def chunk_of(event):
    """The event, checked against the type that the OpenAPI document shows."""
    return msgspec.convert(event, answers.ChatCompletionChunk)


async def test_a_whole_answer_has_openais_shape():
    async with rest_side(say("Hel", "lo")) as rest:
        answer = await rest.chat(model="storyteller-7m")
    assert answer.status == 200
    body = answer.json
    assert body["id"] == f"chatcmpl-{answer.headers['x-request-id']}"
    assert body["object"] == "chat.completion"
    assert body["model"] == "storyteller-7m"
    assert body["system_fingerprint"].startswith("baton-")
    message = {"role": "assistant", "content": "Hello", "refusal": None, "annotations": []}
    assert body["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    usage = body["usage"]
    assert usage["completion_tokens"] == 2
    assert usage["total_tokens"] == usage["prompt_tokens"] + 2
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_stream_is_role_then_pieces_then_end_then_done():
    async with rest_side(say("Hel", "lo")) as rest:
        answer = await rest.chat(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    choices = [chunk_of(event).choices[0] for event in answer.events]
    assert [(c.delta.role, c.delta.content, c.finish_reason) for c in choices] == [
        ("assistant", "", None),
        (None, "Hel", None),
        (None, "lo", None),
        (None, None, "stop"),
    ]
    assert {event["id"] for event in answer.events} == {f"chatcmpl-{answer.headers['x-request-id']}"}
    assert all("usage" not in event for event in answer.events)


async def test_the_usage_comes_in_a_last_chunk_without_choices():
    async with rest_side(say("Hi")) as rest:
        answer = await rest.chat(stream=True, stream_options={"include_usage": True})
    *chunks, last = answer.events
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 1
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_continuous_usage_counts_up():
    async with rest_side(say("a", "b", "c")) as rest:
        answer = await rest.chat(stream=True, stream_options={"continuous_usage_stats": True})
    assert [event["usage"]["completion_tokens"] for event in answer.events] == [0, 1, 2, 3, 3]


async def test_every_choice_has_its_role_before_any_text():
    async with rest_side(say("x")) as rest:
        answer = await rest.chat(stream=True, n=3)
    events = answer.events
    assert [event["choices"][0]["index"] for event in events[:3]] == [0, 1, 2]
    assert all(event["choices"][0]["delta"].get("role") == "assistant" for event in events[:3])
    assert all("role" not in event["choices"][0]["delta"] for event in events[3:])


async def test_whole_answers_keep_the_choices_apart():
    def script(generation):
        for text in "ab":
            for index in range(2):
                generation.emit(f"{text}{index}", index)
        generation.finish(1, "length")
        generation.finish(0, "stop", 17)
        generation.done(4, cached_tokens=3)

    async with rest_side(script) as rest:
        body = (await rest.chat(n=2)).json
    assert [choice["message"]["content"] for choice in body["choices"]] == ["a0b0", "a1b1"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert [choice["stop_reason"] for choice in body["choices"]] == [17, None]
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_carry_token_bytes_and_alternatives(stream):
    def script(generation):
        assert generation.request.sampling.logprobs == 2
        entry = logprob("é", -0.5, ("é", -0.5), ("e", -1.5))
        generation.emit("é", logprobs=[entry])
        generation.emit("", logprobs=[logprob("x", float("-inf"))])
        generation.finish()
        generation.done()

    async with rest_side(script) as rest:
        answer = await rest.chat(stream=stream, logprobs=True, top_logprobs=2)
    choices = [event["choices"][0] for event in answer.events] if stream else answer.json["choices"]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    first, second = entries
    assert first["token"] == "é"
    assert first["bytes"] == [0xC3, 0xA9]
    assert [top["token"] for top in first["top_logprobs"]] == ["é", "e"]
    assert second["logprob"] == -9999.0


async def test_a_matched_stop_string_is_the_stop_reason():
    def script(generation):
        assert list(generation.request.stop.stop) == ["END"]
        generation.emit("text")
        generation.finish(stop_reason="END")
        generation.done()

    async with rest_side(script) as rest:
        events = (await rest.chat(stream=True, stop="END")).events
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"][0]["stop_reason"] == "END"


async def test_sampling_fields_reach_the_generation_side():
    fields = {
        "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "seed": -1, "presence_penalty": 1, "min_tokens": 2,
        "frequency_penalty": -1, "repetition_penalty": 1.5, "logit_bias": {"5": -100, "6": 1.5}, "stop": ["a", "b"],
        "stop_token_ids": [9], "ignore_eos": True, "max_tokens": 7, "max_completion_tokens": 5, "priority": -3,
        "cache_salt": "s", "include_stop_str_in_output": True, "skip_special_tokens": False, "n": 2,
    }  # fmt: skip
    async with rest_side(say("x")) as rest:
        assert (await rest.chat(**fields)).status == 200
        request = (await rest.generator.next()).request
    sampling, stop = request.sampling, request.stop
    assert sampling.HasField("temperature")
    assert sampling.temperature == 0
    assert (sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0, 2**64 - 1)
    assert list(sampling.logit_bias_token_ids) == [5, 6]
    assert list(sampling.logit_bias_values) == [-100, 1.5]
    assert not sampling.HasField("logprobs")
    assert (stop.max_tokens, stop.min_tokens, list(stop.stop_token_ids), stop.ignore_eos) == (5, 2, [9], True)
    assert (request.n, request.priority, request.cache_salt, request.skip_special_tokens) == (2, -3, "s", False)


async def test_fields_left_out_stay_unset():
    async with rest_side(say("x")) as rest:
        await rest.chat(temperature=None, max_tokens=None)
        request = (await rest.generator.next()).request
    assert not request.sampling.ListFields()
    assert not request.stop.ListFields()


async def test_the_prompt_is_rendered_by_the_models_template():
    async with rest_side(say("x")) as rest:
        parts = [{"type": "text", "text": "Hi"}]
        for content in ("Hi", parts):
            await rest.post(PATH, {"messages": [{"role": "user", "content": content}]})
        model = rest.catalog.get("")
        texts = [model.tokenizer.decode(one.request.prompt_token_ids) for one in rest.generator.started]
    assert texts == ["<|bos|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"] * 2


async def test_no_piece_is_sent_for_a_delta_without_text():
    def script(generation):
        generation.emit("")
        generation.emit("你")
        generation.finish()
        generation.done()

    async with rest_side(script) as rest:
        events = (await rest.chat(stream=True)).events
    assert [event["choices"][0]["delta"].get("content") for event in events] == ["", "你", None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "kind", "retry"),
    [
        (NoCapacity("every worker is full", retry_after_ms=1500), 429, "rate_limit_error", "2"),
        (Unavailable("no worker"), 503, "service_unavailable_error", "1"),
        (InvalidRequest("bad id", field="stop_token_ids"), 400, "invalid_request_error", None),
        (RuntimeError("secret"), 500, "server_error", None),
    ],
)
async def test_a_refusal_has_its_status_and_openais_form(stream, refusal, status, kind, retry):
    async with rest_side() as rest:
        rest.generator.refusal = refusal
        answer = await rest.chat(stream=stream)
        assert rest.admission.in_use == 0
    assert answer.status == status
    assert answer.error["type"] == kind
    assert answer.headers.get("retry-after") == retry
    assert "secret" not in answer.error["message"]


async def test_an_error_before_the_first_piece_of_a_stream_still_has_its_status():
    async with rest_side(lambda generation: generation.sink.on_error(NoCapacity("queue full"))) as rest:
        answer = await rest.chat(stream=True)
    assert answer.status == 429


async def test_an_error_after_the_head_is_an_event_and_then_done():
    def script(generation):
        generation.emit("Hel")
        generation.sink.on_error(Unavailable("worker died"))

    async with rest_side(script) as rest:
        answer = await rest.chat(stream=True)
    assert answer.status == 200
    assert answer.events[-1]["error"]["message"] == "worker died"


async def test_a_client_that_leaves_aborts_at_once():
    async with rest_side() as rest, RawClient.connect(rest.port) as client:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        await client.send(request_bytes("POST", PATH, body))
        generation = await rest.generator.next()
        generation.emit("Hello")
        await client.head()
        client.writer.close()
        async with asyncio.timeout(10):
            await generation.aborted.wait()
        assert rest.admission.in_use == 0


async def test_a_client_that_leaves_before_the_first_piece_aborts_at_once():
    async with rest_side() as rest, RawClient.connect(rest.port) as client:
        await client.send(request_bytes("POST", PATH, {"messages": [{"role": "user", "content": "Hi"}]}))
        generation = await rest.generator.next()
        client.writer.transport.abort()
        async with asyncio.timeout(10):
            await generation.aborted.wait()


async def test_a_client_that_leaves_during_placement_holds_no_place():
    async with rest_side() as rest, RawClient.connect(rest.port) as client:
        rest.generator.hold = asyncio.Event()
        await client.send(request_bytes("POST", PATH, {"messages": [{"role": "user", "content": "Hi"}]}))
        await until(lambda: rest.admission.in_use)
        client.writer.transport.abort()
        await until(lambda: not rest.admission.in_use, 5)
        rest.generator.hold.set()
        await asyncio.sleep(0.01)
        assert not rest.generator.started


async def test_a_request_id_is_taken_from_the_header_and_given_back():
    async with rest_side(say("x")) as rest:
        answer = await rest.post(
            PATH, {"messages": [{"role": "user", "content": "Hi"}]}, headers={"x-request-id": "mine-1"}
        )
        generation = await rest.generator.next()
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json["id"] == "chatcmpl-mine-1"
    assert generation.request.request_id == "mine-1"


async def test_one_request_id_twice_at_once_is_two_requests_inside():
    async with rest_side() as rest:
        headers = {"x-request-id": "same"}
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        both = asyncio.gather(*(rest.post(PATH, body, headers) for _ in range(2)))
        await rest.generator.next(1)
        for generation in rest.generator.started:
            say("x")(generation)
        answers = await both
        names = {generation.request.request_id for generation in rest.generator.started}
    assert len(names) == 2
    assert {answer.json["id"] for answer in answers} == {"chatcmpl-same"}


async def test_excess_generations_get_a_retry_delay():
    async with rest_side(max_streams=2) as rest:
        running = asyncio.create_task(rest.chat(n=2))
        generation = await rest.generator.next()
        answer = await rest.chat()
        assert answer.status == 429
        assert answer.error["code"] == "rate_limit_exceeded"
        assert int(answer.headers["retry-after"]) >= 1
        say("x")(generation)
        assert (await running).status == 200
