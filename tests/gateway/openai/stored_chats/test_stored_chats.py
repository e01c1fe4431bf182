"""Chats with `store`: stored, listed, returned and deleted, with a scripted generator."""

import asyncio

import openai
import pytest
from redis import Redis
from support.gateway.rest_harness import rest_side, say

from baton.gateway.openai.stored_chats.store import ChatStore
from baton.gateway.parsing.events import CallArguments, CallEnd, CallStart
from baton.gateway.storage.redis_store import RedisRecordStore
from baton.gateway.storage.store import MAX_LISTED, MemoryRecordStore
from baton.rpc.errors import NotFound

PATH = "/v1/chat/completions"


async def get(rest, path="", **headers):
    return await rest.request("GET", f"{PATH}{path}", headers=headers)


def without_stream(events):
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_chat_is_returned_completely(stream):
    async with rest_side(say("Hel", "lo")) as rest:
        answer = await rest.chat("Hi", store=True, metadata={"a": "b"}, stream=stream, n=2)
        made = answer.events[0] if stream else answer.json
        kept = (await get(rest, f"/{made['id']}")).json
    assert (kept["id"], kept["object"], kept["created"]) == (made["id"], "chat.completion", made["created"])
    assert [choice["message"]["content"] for choice in kept["choices"]] == ["Hello", "Hello"]
    assert kept["metadata"] == {"a": "b"}
    assert kept["usage"]["completion_tokens"] == 4
    if not stream:
        assert kept == {**made, "metadata": {"a": "b"}}


async def test_calls_are_kept_too():
    def script(generation):
        for event in (CallStart(0, "call_1", "f"), CallArguments(0, "{}"), CallEnd(0)):
            generation.emit("", events=[event])
        generation.finish(reason="tool_calls")
        generation.done()

    tool = {"type": "function", "function": {"name": "f"}}
    async with rest_side(script) as rest:
        asked = {"tools": [tool], "tool_choice": "required", "store": True, "stream": True}
        made = (await rest.chat(**asked)).events[0]
        kept = (await get(rest, f"/{made['id']}")).json
    (call,) = kept["choices"][0]["message"]["tool_calls"]
    assert (call["id"], call["function"]) == ("call_1", {"name": "f", "arguments": "{}"})


async def test_chats_without_store_are_not_stored():
    async with rest_side(say("x")) as rest:
        made = (await rest.chat()).json
        answer = await get(rest, f"/{made['id']}")
        listed = (await get(rest)).json
    assert (answer.status, answer.error["param"]) == (404, "completion_id")
    assert listed == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_chats_are_listed_page_by_page():
    async with rest_side(say("x")) as rest:
        ids = [(await rest.chat(store=True, metadata={"n": str(at % 2)})).json["id"] for at in range(5)]
        first = (await get(rest, "?limit=2")).json
        second = (await get(rest, f"?limit=3&after={first['last_id']}")).json
        latest = (await get(rest, "?order=desc&limit=1")).json
        odd = (await get(rest, "?metadata[n]=1")).json
        other = (await get(rest, "?model=other")).json
    assert ([one["id"] for one in first["data"]], first["has_more"]) == (ids[:2], True)
    assert ([one["id"] for one in second["data"]], second["has_more"]) == (ids[2:], False)
    assert [one["id"] for one in latest["data"]] == ids[4:]
    assert [one["id"] for one in odd["data"]] == [ids[1], ids[3]]
    assert other["data"] == []


async def test_the_messages_are_kept():
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "Noon"},
    ]
    async with rest_side(say("x")) as rest:
        made = (await rest.post(PATH, {"messages": messages, "store": True})).json
        page = (await get(rest, f"/{made['id']}/messages?limit=2")).json
        rest_of_it = (await get(rest, f"/{made['id']}/messages?after={page['last_id']}")).json
    listed = [*page["data"], *rest_of_it["data"]]
    assert (page["has_more"], rest_of_it["has_more"]) == (True, False)
    assert len({message.pop("id") for message in listed}) == 3
    assert listed == messages


async def test_metadata_is_replaced_and_chats_are_forgotten():
    async with rest_side(say("x")) as rest:
        made = (await rest.chat(store=True, metadata={"a": "b"})).json
        updated = await rest.post(f"{PATH}/{made['id']}", {"metadata": {"c": "d"}})
        assert updated.json == {**made, "metadata": {"c": "d"}}
        assert (await get(rest, f"/{made['id']}")).json == updated.json
        gone = await rest.request("DELETE", f"{PATH}/{made['id']}")
        assert gone.json == {"id": made["id"], "object": "chat.completion.deleted", "deleted": True}
        assert (await get(rest)).json["data"] == []
        for method, body in (("GET", None), ("DELETE", None), ("POST", {"metadata": {}})):
            assert (await rest.request(method, f"{PATH}/{made['id']}", body)).status == 404


async def test_two_gateways_share_the_records_in_redis_until_they_expire(redis_server):
    stores = [RedisRecordStore(redis_server.url, 60) for _ in range(2)]
    async with rest_side(say("x"), store=stores[0]) as one, rest_side(store=stores[1]) as other:
        made = (await one.chat(store=True)).json
        assert (await get(other, f"/{made['id']}")).json["choices"] == made["choices"]
        assert [chat["id"] for chat in (await get(other)).json["data"]] == [made["id"]]
        with Redis.from_url(redis_server.url) as client:
            keys = client.keys("baton:*")
            assert len(keys) == 2
            assert all(0 < client.ttl(key) <= 60 for key in keys)
            client.delete(f"baton:responses:chat:0::{made['id']}")
        assert (await get(other, f"/{made['id']}")).status == 404
        assert (await get(one)).json["data"] == []


async def test_without_redis_chats_are_answered_and_not_found(redis_server):
    async with rest_side(say("Hello"), store=RedisRecordStore(redis_server.url, 60)) as rest:
        redis_server.stop()
        made = await rest.chat(store=True)
        assert (made.status, made.json["choices"][0]["message"]["content"]) == (200, "Hello")
        answer = await get(rest, f"/{made.json['id']}")
        assert answer.status == 503
        assert (await get(rest)).status == 503


async def test_other_tenants_chats_are_not_there():
    async with rest_side(say("x")) as rest:
        made = (await rest.chat(store=True)).json
        chats = ChatStore(rest.responses.records, rest.responses.spawn)
        assert (await chats.get("", made["id"])).completion["id"] == made["id"]
        assert await chats.ids("") == [made["id"]]
        for tenant, name in (("acme", made["id"]), ("0:", made["id"]), ("", f"0::{made['id']}")):
            assert await chats.find(tenant, name) is None
            assert not tenant or await chats.ids(tenant) == []
            with pytest.raises(NotFound):
                await chats.delete(tenant, name)
        # Nor are they responses.
        assert (await rest.request("GET", f"/v1/responses/chat:0::{made['id']}")).status == 404
        assert (await rest.request("DELETE", f"/v1/responses/chat:0::{made['id']}")).status == 404
        assert (await get(rest, f"/{made['id']}")).status == 200


async def test_the_list_in_memory_is_bounded_and_forgets():
    now = 0.0
    store = MemoryRecordStore(10, 1 << 20, lambda: now)
    for number in range(MAX_LISTED + 3):
        await store.enlist("g", str(number))
    assert (await store.listed("g"))[0] == "3"
    now = 11.0
    assert await store.listed("g") == []


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=x", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after")],
)
async def test_wrong_queries_are_refused(query, param):
    async with rest_side(say("x")) as rest:
        made = (await rest.chat(store=True)).json
        for path in ("", f"/{made['id']}/messages"):
            answer = await get(rest, f"{path}?{query}")
            assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    "metadata", [{str(index): "x" for index in range(17)}, {"k" * 65: "x"}, {"k": "x" * 513}, {"k": 5}]
)
async def test_too_much_metadata_is_refused(metadata):
    async with rest_side(say("x")) as rest:
        answer = await rest.chat(store=True, metadata=metadata)
        assert (answer.status, answer.error["param"].partition(".")[0]) == (400, "metadata")
        made = (await rest.chat(store=True)).json
        answer = await rest.post(f"{PATH}/{made['id']}", {"metadata": metadata})
        assert (answer.status, answer.error["param"].partition(".")[0]) == (400, "metadata")


async def test_openais_client_finds_its_chats():
    async with (
        rest_side(say("Hello")) as rest,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{rest.port}/v1", api_key="none", max_retries=0) as client,
    ):
        asked = {"model": "storyteller-7m", "messages": [{"role": "user", "content": "Hi"}], "store": True}
        made, other = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(2)))
        found = await client.chat.completions.retrieve(made.id)
        assert found.choices[0].message.content == "Hello"
        assert {one.id async for one in client.chat.completions.list(limit=1)} == {made.id, other.id}
        (message,) = (await client.chat.completions.messages.list(made.id)).data
        assert (message.role, message.content) == ("user", "Hi")
        assert (await client.chat.completions.update(made.id, metadata={"a": "b"})).metadata == {"a": "b"}
        assert (await client.chat.completions.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.retrieve(made.id)
