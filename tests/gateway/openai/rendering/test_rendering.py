"""Texts to token ids and back: rendering, generating and derendering give what one request gives."""

import pytest
from support.gateway.rest_harness import RawClient, rest_side, say
from support.gateway.scripted_gateway import running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GENERATE = "/inference/v1/generate"
NAME = "storyteller-7m"
MESSAGES = [{"role": "user", "content": "Tell me a story"}]
STORY = [260, 261, 262, 263, 264, 4]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def without_times(answer):
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 20},
        {"max_completion_tokens": 3, "temperature": 0.5, "seed": 7, "top_k": 5},
        {"logprobs": True, "top_logprobs": 2, "max_tokens": 4},
        {"stop_token_ids": [262], "return_token_ids": True},
        {"n": 2, "tools": [TOOL], "skip_special_tokens": False},
    ],
)
async def test_a_chat_in_three_steps_is_the_chat_in_one(fields):
    async with running(lambda submit: STORY) as gateway, RawClient.connect(gateway.port) as client:
        chat = {"model": NAME, "messages": MESSAGES, **fields}
        whole = (await client.request("POST", CHAT, chat)).json
        rendered = await client.request("POST", f"{CHAT}/render", chat)
        assert rendered.status == 200, rendered.body
        generated = await client.request("POST", GENERATE, rendered.json)
        assert generated.status == 200, generated.body
        one, other = gateway.worker.submits[0], gateway.worker.submits[-1]
        assert one.prompt_token_ids == other.prompt_token_ids == rendered.json["token_ids"]
        assert one.stop == other.stop
        derender = {"model": NAME, "generate_response": generated.json, "chat_request": chat}
        answer = await client.request("POST", f"{CHAT}/derender", derender)
        assert answer.status == 200, answer.body
        assert answer.json["id"] == generated.json["request_id"]
        whole.pop("prompt_token_ids", None)
        assert without_times(answer.json) == without_times(whole)


async def test_completions_in_three_steps_are_the_completions_in_one():
    async with running(lambda submit: STORY) as gateway, RawClient.connect(gateway.port) as client:
        body = {"model": NAME, "prompt": ["Hi", "A dog"], "max_tokens": 5, "logprobs": 1}
        whole = (await client.request("POST", TEXT, body)).json
        rendered = (await client.request("POST", f"{TEXT}/render", body)).json
        assert len({one["request_id"] for one in rendered}) == 2
        generated = [(await client.request("POST", GENERATE, one)).json for one in rendered]
        counts = [len(one["token_ids"]) for one in rendered]
        derender = {"model": NAME, "generate_responses": generated, "prompt_tokens": counts, "completion_request": body}
        answer = (await client.request("POST", f"{TEXT}/derender", derender)).json
        assert without_times(answer) == without_times(whole)


async def test_stop_strings_cut_the_derendered_text():
    async with rest_side() as rest:
        token_ids = rest.catalog.models()[0].tokenizer.encode("Once upon a time", add_special_tokens=False)
        body = {
            "model": NAME,
            "generate_responses": [{"request_id": "r", "choices": [{"index": 0, "token_ids": token_ids}]}],
            "completion_request": {"prompt": "Hi", "stop": " a"},
        }
        (choice,) = (await rest.post(f"{TEXT}/derender", body)).json["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Once upon", "stop", " a")


async def test_names_of_token_ids_become_texts():
    async with rest_side() as rest:
        one, other = rest.catalog.models()[0].tokenizer.encode(" a dog", add_special_tokens=False)[:2]
        top = {"token": f"token_id:{other}", "logprob": -2.0, "bytes": None}
        entry = {"token": f"token_id:{one}", "logprob": -1.0, "bytes": None, "top_logprobs": [top]}
        choice = {"index": 0, "token_ids": [one], "logprobs": {"content": [entry]}, "finish_reason": "length"}
        body = {"model": NAME, "generate_response": {"request_id": "r", "choices": [choice]}, "prompt_tokens": 5}
        answer = (await rest.post(f"{CHAT}/derender", body)).json
        (made,) = answer["choices"]
        (shown,) = made["logprobs"]["content"]
        assert (shown["token"], shown["bytes"]) == (made["message"]["content"], list(shown["token"].encode()))
        assert not shown["top_logprobs"][0]["token"].startswith("token_id")
        assert answer["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (f"{CHAT}/render", {}, "messages"),
        (f"{CHAT}/render", {"messages": MESSAGES, "top_p": 2}, "top_p"),
        (f"{CHAT}/render", {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        (f"{TEXT}/render", {"prompt": "Hi", "echo": True}, "echo"),
        (f"{TEXT}/render", {"prompt": ["Hi", 5]}, "prompt.1"),
        (f"{CHAT}/derender", {"model": NAME}, "generate_response"),
        (f"{CHAT}/derender", {"model": NAME, "stream": True, "generate_response": {"request_id": "r", "choices": []}},
         "generate_chunk"),
        (f"{CHAT}/derender", {"model": NAME, "stream": True, "generate_chunk": {"request_id": "r", "choices": [
            {"index": 0, "token_ids": [5]}, {"index": 1, "token_ids": [5]}]}}, "generate_chunk.choices"),
        (f"{CHAT}/derender", {"model": NAME, "stream": True, "stream_state": {"output_token_ids": [5] * 2048},
            "generate_chunk": {"request_id": "r", "choices": [{"index": 0, "token_ids": [5]}]}},
         "generate_chunk.choices.0.token_ids"),
        (f"{CHAT}/derender", {"model": NAME, "stream": True, "stream_state": {"output_token_ids": [-1]},
            "generate_chunk": {"request_id": "r", "choices": []}}, "stream_state.output_token_ids.0"),
        (f"{TEXT}/derender", {"model": NAME, "stream": True, "prompt_tokens": [1],
            "generate_chunk": {"request_id": "r", "choices": []}}, "prompt_tokens"),
        (f"{CHAT}/derender", {"model": NAME, "generate_response": {"request_id": "r", "choices": []}},
         "generate_response.choices"),
        (f"{CHAT}/derender", {"model": NAME, "generate_response": {"request_id": "r", "choices": [
            {"index": 0, "token_ids": [99999]}]}}, "generate_response.choices.0.token_ids.0"),
        (f"{CHAT}/derender", {"model": NAME, "generate_response": {"request_id": "r", "choices": [
            {"index": 0, "token_ids": [-1]}]}}, "generate_response.choices.0.token_ids"),
        (f"{CHAT}/derender", {"model": NAME, "generate_response": {"request_id": "r", "choices": [
            {"index": 0, "token_ids": [5] * 2049}]}}, "generate_response.choices.0.token_ids"),
        (f"{CHAT}/derender", {"model": NAME, "chat_request": {"messages": []}, "generate_response": {
            "request_id": "r", "choices": [{"index": 0, "token_ids": [5]}]}}, "chat_request.messages"),
        (f"{TEXT}/derender", {"model": NAME, "generate_responses": [
            {"request_id": "r", "choices": [{"index": 0, "token_ids": [1 << 40]}]}]},
         "generate_responses.0.choices.0.token_ids.0"),
        (f"{TEXT}/derender", {"model": NAME, "generate_responses": []}, "generate_responses"),
        (f"{TEXT}/derender", {"model": NAME, "prompt_tokens": [1, 2], "generate_responses": [
            {"request_id": "r", "choices": [{"index": 0, "token_ids": [5]}]}]}, "prompt_tokens"),
    ],
)  # fmt: skip
async def test_wrong_bodies_are_refused(path, body, param):
    async with rest_side() as rest:
        refused = await rest.post(path, body)
        assert (refused.status, refused.error["param"]) == (400, param), refused.body


async def test_an_unknown_model_is_not_found():
    async with rest_side() as rest:
        body = {"model": "x", "generate_response": {"request_id": "r", "choices": [{"index": 0, "token_ids": [5]}]}}
        assert (await rest.post(f"{CHAT}/derender", body)).status == 404
        assert (await rest.post(f"{CHAT}/render", {"model": "x", "messages": MESSAGES})).status == 404


async def test_nothing_is_generated():
    async with rest_side(say("x")) as rest:
        await rest.post(f"{CHAT}/render", {"messages": MESSAGES})
        await rest.post(f"{TEXT}/render", {"prompt": "Hi"})
        assert not rest.generator.started
