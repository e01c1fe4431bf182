"""Events that are derendered one by one give what the stream of one request gives, in pieces of any size."""

import pytest
from support.gateway.rest_harness import RawClient, rest_side, say
from support.gateway.scripted_gateway import running

from baton.gateway.models.tokenization.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NAME = "storyteller-7m"
MESSAGES = [{"role": "user", "content": "Tell me a story"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OUTPUT = '<think>hm \u2705</think>Well: <tool_call>{"name": "f", "arguments": {"a": "\u65e5"}}</tool_call>'


def merged(chunks):
    """Returns the message and the finish reason that the deltas of one choice make."""
    message, calls, reason = {}, [], None
    for choice in (one for chunk in chunks for one in chunk["choices"]):
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                for call in value:
                    if call["index"] == len(calls):
                        calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                    calls[call["index"]]["arguments"] += call["function"].get("arguments", "")
            elif value is not None:
                message[name] = message.get(name, "") + value
        reason = choice["finish_reason"] or reason
    return message, calls, reason


async def derendered(client, path, pieces, **fields):
    """Returns the chunks of a stream whose tokens come in these pieces, the last of which ends it."""
    chunks, state = [], None
    for number, token_ids in enumerate(pieces):
        choice = {"index": 0, "token_ids": token_ids}
        if number == len(pieces) - 1:
            choice["finish_reason"] = "stop"
        body = {"model": NAME, "stream": True, "generate_chunk": {"request_id": "r", "choices": [choice]}}
        answer = await client.request("POST", f"{path}/derender", {**body, "stream_state": state, **fields})
        assert answer.status == 200, answer.body
        state = answer.json["stream_state"]
        chunks.append(answer.json["chunk"])
    return chunks


def cut(token_ids, size):
    return [token_ids[begin : begin + size] for begin in range(0, len(token_ids), size)]


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_reasoning_and_calls_are_those_of_the_whole_output(size):
    formats = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with running(lambda submit: [], **formats) as gateway, RawClient.connect(gateway.port) as client:
        token_ids = (await client.request("POST", "/tokenize", {"prompt": OUTPUT, "add_special_tokens": False})).json
        chat = {"model": NAME, "messages": MESSAGES, "tools": [TOOL]}
        response = {"request_id": "r", "choices": [{"index": 0, "token_ids": token_ids["tokens"]}]}
        whole = {"model": NAME, "generate_response": response, "chat_request": chat}
        (wanted,) = (await client.request("POST", f"{CHAT}/derender", whole)).json["choices"]
        chunks = await derendered(client, CHAT, cut(token_ids["tokens"], size), chat_request=chat)
        message, calls, reason = merged(chunks)
        assert message["reasoning"] == wanted["message"]["reasoning"] == "hm \u2705"
        assert message["content"] == wanted["message"]["content"]
        (call,) = wanted["message"]["tool_calls"]
        assert [(one["name"], one["arguments"]) for one in calls] == [("f", call["function"]["arguments"])]
        assert calls[0]["id"].startswith(call["id"][:5])
        assert reason == wanted["finish_reason"] == "tool_calls"
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
        assert [name for chunk in chunks for one in chunk["choices"] for name in one["delta"] if name == "role"] == [
            "role"
        ]


@pytest.mark.parametrize("size", [1, 4])
async def test_a_text_ends_at_its_stop_string_and_nothing_follows(size):
    async with rest_side() as rest, RawClient.connect(rest.port) as client:
        tokenizer: Tokenizer = rest.catalog.models()[0].tokenizer
        token_ids = tokenizer.encode("Once \u2705 upon a time there was", add_special_tokens=False)
        fields = {"completion_request": {"prompt": "Hi", "stop": " a ti"}}
        chunks = await derendered(client, TEXT, cut(token_ids, size), **fields)
        choices = [one for chunk in chunks for one in chunk["choices"]]
        assert "".join(one["text"] for one in choices) == "Once \u2705 upon"
        assert [(one["finish_reason"], one["stop_reason"]) for one in choices if one["finish_reason"]] == [
            ("stop", " a ti")
        ]


async def test_a_generated_stream_is_derendered_event_by_event():
    story = [260, 261, 262, 263, 264, 4]
    async with running(lambda submit: story) as gateway, RawClient.connect(gateway.port) as client:
        chat = {"model": NAME, "messages": MESSAGES, "max_tokens": 20, "logprobs": True}
        whole = (await client.request("POST", CHAT, chat)).json
        rendered = (await client.request("POST", f"{CHAT}/render", chat)).json
        streamed = {**rendered, "stream": True, "stream_options": {"include_usage": True}}
        events = (await client.request("POST", "/inference/v1/generate", streamed)).events
        chunks, state = [], None
        for event in events:
            body = {"model": NAME, "stream": True, "generate_chunk": event, "stream_state": state, "chat_request": chat}
            body["prompt_token_ids"] = rendered["token_ids"]
            answer = (await client.request("POST", f"{CHAT}/derender", body)).json
            state = answer["stream_state"]
            chunks.append(answer["chunk"])
        message, _, reason = merged(chunks)
        (wanted,) = whole["choices"]
        assert (message["content"], reason) == (wanted["message"]["content"], wanted["finish_reason"])
        logprobs = [
            entry
            for chunk in chunks
            for one in chunk["choices"]
            for entry in (one["logprobs"] or {}).get("content", ())
        ]
        assert [entry["token"] for entry in logprobs] == [entry["token"] for entry in wanted["logprobs"]["content"]]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]


MARKED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}\n{% endfor %}"
)


async def test_a_rendered_chat_has_the_assistants_mask_that_tokenize_gives():
    chat = [*MESSAGES, {"role": "assistant", "content": "Once upon a time"}, {"role": "user", "content": "And?"}]
    body = {"messages": chat, "chat_template": MARKED, "return_assistant_tokens_mask": True}
    async with rest_side(say("x"), trust_request_chat_template=True, strict_fields=True) as rest:
        wanted = (await rest.post("/tokenize", body)).json
        rendered = (await rest.post(f"{CHAT}/render", body)).json
        assert rendered["token_ids"] == wanted["tokens"]
        assert rendered["assistant_tokens_mask"] == wanted["assistant_tokens_mask"]
        assert 0 < sum(wanted["assistant_tokens_mask"]) < wanted["count"]
        shorter = (await rest.post(f"{CHAT}/render", {**body, "truncate_prompt_tokens": 5})).json
        assert shorter["assistant_tokens_mask"] == wanted["assistant_tokens_mask"][-5:]
        assert "assistant_tokens_mask" not in (await rest.post(f"{CHAT}/render", {"messages": chat})).json
        refused = await rest.post(f"{CHAT}/render", {**body, "chat_template": None})
        assert (refused.status, refused.error["param"]) == (400, "return_assistant_tokens_mask")
        assert (await rest.post("/inference/v1/generate", rendered)).status == 200
