"""Large bodies are parsed and validated outside the event loop, on every route."""

import asyncio
import json
import threading
import time

import pytest
from support.gateway.rest_harness import RawClient, request_bytes, rest_side, say
from support.gateway.scripted_gateway import running
from support.processes.loop_stalls import loop_stalls

from baton.gateway.access.refusals import LARGE_BODY
from baton.gateway.bodies.thread import INLINE_BYTES, BodyThread
from baton.gateway.errors.http import ContextTooLong
from baton.gateway.fields.chat import MAX_ITEMS, check_item_count

STALL = 0.05  # seconds
MODEL = "storyteller-7m"
CHATS, TEXTS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNTS = "/v1/messages", "/v1/messages/count_tokens"
SAID = [{"role": "user", "content": "a"}] * 30_000
TEXT = "hello there " * 1_200_000


def chat(**fields):
    return {"model": MODEL, "messages": SAID[:1], **fields}


def functions(count, **fields):
    return [
        {"type": "function", "function": {"name": f"f{index}", "parameters": {"type": "object"}, **fields}}
        for index in range(count)
    ]


BODIES = {
    "chat: messages": (CHATS, {"messages": SAID}),
    "chat: text": (CHATS, {"messages": [{"role": "user", "content": TEXT}]}),
    "chat: tools": (CHATS, chat(tools=functions(13_000))),
    "chat: documents": (CHATS, chat(documents=[{"title": "a", "text": "b"}] * 30_000)),
    "chat: biases": (CHATS, chat(logit_bias={str(index): 1 for index in range(60_000)})),
    "chat: one bad word": (CHATS, chat(bad_words=["a" * 15_000_000])),
    "chat: unknown keys": (CHATS, chat(**{f"k{index}": 1 for index in range(60_000)})),
    "chat: a schema": (CHATS, chat(structured_outputs={"json": {"enum": [f"v{index}" for index in range(100_000)]}})),
    "completion: token ids": (TEXTS, {"prompt": [700] * 500_000}),
    "completion: lists of token ids": (TEXTS, {"prompt": [[700] * 400] * 1000}),
    "completion: texts": (TEXTS, {"prompt": ["once upon a time " * 100] * 1000}),
    "completion: strings": (TEXTS, {"prompt": ["a"] * 250_000}),
    "responses: items": (RESPONSES, {"input": SAID}),
    "responses: truncated": (RESPONSES, {"input": SAID[:16_000], "truncation": "auto"}),
    "responses: tools": (
        RESPONSES,
        {"input": "x", "tools": [{"type": "function", "name": f"f{index}"} for index in range(20_000)]},
    ),
    "messages": (MESSAGES, {"model": MODEL, "max_tokens": 1, "messages": SAID}),
    "messages: tools": (
        MESSAGES,
        chat(max_tokens=1, tools=[{"name": f"f{index}", "input_schema": {}} for index in range(20_000)]),
    ),
    "count_tokens": (COUNTS, {"model": MODEL, "messages": SAID}),
    "tokenize: messages": ("/tokenize", {"messages": SAID}),
    "tokenize: text": ("/tokenize", {"prompt": TEXT}),
    "detokenize": ("/detokenize", {"tokens": [700] * 500_000}),
    "generate": ("/inference/v1/generate", {"token_ids": [700] * 500_000}),
    "conversations": ("/v1/conversations", {"items": [{"role": "user", "content": TEXT}]}),
    "conversations: items": ("/v1/conversations", {"items": SAID}),
    "conversations: metadata": ("/v1/conversations", {"metadata": {f"k{index}": "v" for index in range(60_000)}}),
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_large_body_keeps_the_event_loop_free(name):
    path, body = BODIES[name]
    data = request_bytes("POST", path, body)
    async with rest_side(say("Hi")) as rest, RawClient.connect(rest.port) as client:
        rest.catalog.models()[0].info.max_model_len = 65_536
        await client.send(data[:-1])
        await asyncio.sleep(0.05)  # the client's own work
        async with loop_stalls() as stalls, asyncio.timeout(60):
            await client.send(data[-1:])
            status, _ = await client.head()
            await asyncio.sleep(0.01)
    assert status in (200, 400)
    assert stalls.longest < STALL


@pytest.mark.parametrize("name", ["chat: text", "tokenize: text", "conversations", "generate"])
async def test_a_large_body_is_answered_as_a_small_one_is(name):
    path, body = BODIES[name]
    padded = json.dumps({**body, "x-padding": "a" * INLINE_BYTES})
    plain = json.dumps(body)
    async with rest_side(say("Hi")) as rest:
        first, second = [await rest.post(path, text.encode()) for text in (plain, padded)]
    assert first.status == second.status
    assert "x-padding" in second.headers["x-baton-ignored"]
    assert "x-padding" not in first.headers.get("x-baton-ignored", "")


async def test_only_large_work_changes_the_thread():
    bodies = BodyThread()
    here = threading.get_ident()
    assert await bodies.run(threading.get_ident, INLINE_BYTES) == here
    there = {await bodies.run(threading.get_ident, INLINE_BYTES + 1) for _ in range(5)}
    assert len(there) == 1
    assert here not in there


async def test_bodies_refused_by_the_reader_process_are_refused_locally():
    def refuse():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await BodyThread().run(refuse, 1 << 20)


def test_bodies_that_are_read_at_once_are_mostly_small():
    assert LARGE_BODY <= INLINE_BYTES <= 64 << 10


async def test_a_gateways_event_loop_waits_little_for_threads_that_compute():
    """Three of them keep the interpreter: the loop gets it after half a millisecond of each."""
    async with running(lambda submit: [10, 4]):
        stop = threading.Event()

        def compute():
            while not stop.is_set():
                sum(range(1000))

        threads = [threading.Thread(target=compute) for _ in range(3)]
        for thread in threads:
            thread.start()
        medians = []
        try:
            while len(medians) < 5 and min(medians, default=1.0) >= 0.015:  # of a busy machine the best round counts
                late = []
                for _ in range(100):
                    began = time.perf_counter()
                    await asyncio.sleep(0.001)
                    late.append(time.perf_counter() - began - 0.001)
                medians.append(sorted(late)[50])
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert min(medians) < 0.015  # with Python's own interval it is 50 ms


def test_a_chat_has_as_many_items_as_are_rendered_in_that_time():
    check_item_count(MAX_ITEMS, 10**6)
    with pytest.raises(ContextTooLong, match=str(MAX_ITEMS)):
        check_item_count(MAX_ITEMS + 1, 10**6)
