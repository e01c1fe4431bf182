"""Conversations over REST: made, read, continued by responses, deleted; each tenant's apart; in memory and in Redis."""

import asyncio
import time

import pytest
from support.gateway.responses_rig import GateOf
from support.gateway.rest_harness import FakeGenerator, rest_side, say, until

from baton.gateway.responses.conversations import store as conversation_store
from baton.gateway.responses.conversations.store import ConversationStore
from baton.gateway.rest.app import App
from baton.gateway.storage.redis_store import RedisRecordStore
from baton.gateway.storage.store import MemoryRecordStore
from baton.rpc.errors import NotFound, Unavailable

PATH = "/v1/conversations"
USER = {"role": "user", "content": "Who are you?"}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "ok"}


@pytest.fixture(params=["memory", "redis"])
def make_store(request):
    """A maker of stores; those in Redis are of one server."""
    if request.param == "memory":
        return lambda ttl=60.0: MemoryRecordStore(ttl, 1 << 20)
    server = request.getfixturevalue("redis_server")
    return lambda ttl=60.0: RedisRecordStore(server.url, ttl)


async def begin(rest, *items, **fields):
    answer = await rest.post(PATH, {"items": list(items), **fields})
    assert answer.status == 200, answer.body
    return answer.json


async def texts(rest, conversation_id, query="?order=asc&limit=100"):
    answer = await rest.request("GET", f"{PATH}/{conversation_id}/items{query}")
    assert answer.status == 200, answer.body
    return [
        part["text"] if item["type"] == "message" else item["type"]
        for item in answer.json["data"]
        for part in item.get("content") or [{}]
    ]


async def ask(rest, given, conversation, **fields):
    return await rest.post("/v1/responses", {"input": given, "conversation": conversation, **fields})


async def test_a_conversation_is_begun_read_changed_and_deleted(make_store):
    async with rest_side(store=make_store()) as rest:
        made = await begin(rest, USER, metadata={"topic": "demo"})
        assert made["id"].startswith("conv_")
        assert (made["object"], made["metadata"]) == ("conversation", {"topic": "demo"})
        one = f"{PATH}/{made['id']}"
        assert (await rest.request("GET", one)).json == made
        changed = (await rest.post(one, {"metadata": {"topic": "x"}})).json
        assert changed == made | {"metadata": {"topic": "x"}}
        assert (await rest.request("GET", one)).json == changed
        assert await texts(rest, made["id"]) == ["Who are you?"]
        deleted = (await rest.request("DELETE", one)).json
        assert deleted == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
        for method, path in (("GET", one), ("DELETE", one), ("GET", f"{one}/items"), ("GET", f"{one}/items/x")):
            answer = await rest.request(method, path)
            assert (answer.status, answer.error["param"]) == (404, "conversation_id")
        assert (await rest.post(f"{one}/items", {"items": [USER]})).status == 404


async def test_items_are_added_listed_found_and_deleted(make_store):
    async with rest_side(store=make_store()) as rest:
        made = await begin(rest)
        items = f"{PATH}/{made['id']}/items"
        added = (await rest.post(items, {"items": [USER, CALL, OUTPUT | {"id": "fco_mine"}]})).json
        assert (added["object"], added["has_more"]) == ("list", False)
        message, call, output = added["data"]
        assert message["content"] == [{"type": "input_text", "text": "Who are you?"}]
        assert message["status"] == "completed"
        assert output["id"] == "fco_mine"
        assert (await rest.request("GET", f"{items}/{call['id']}")).json == call
        page = (await rest.request("GET", f"{items}?limit=2")).json
        assert [item["id"] for item in page["data"]] == ["fco_mine", call["id"]]
        assert (page["first_id"], page["last_id"], page["has_more"]) == ("fco_mine", call["id"], True)
        page = (await rest.request("GET", f"{items}?after={call['id']}&order=asc")).json
        assert [item["id"] for item in page["data"]] == ["fco_mine"]
        assert (await rest.request("DELETE", f"{items}/{call['id']}")).json == made
        assert await texts(rest, made["id"]) == ["Who are you?", "function_call_output"]
        for method in ("GET", "DELETE"):
            answer = await rest.request(method, f"{items}/{call['id']}")
            assert (answer.status, answer.error["param"]) == (404, "item_id")


async def test_responses_read_a_conversation_and_add_to_it(make_store):
    async with rest_side(say("I am ", "Baton."), store=make_store()) as rest:
        made = await begin(rest, {"role": "system", "content": "Be brief."})
        first = await ask(rest, "Who are you?", made["id"])
        assert first.json["conversation"] == {"id": made["id"]}
        second = await ask(rest, "Really?", {"id": made["id"]}, store=False, stream=True)
        assert second.status == 200
        prompts = [generation.request.prompt_token_ids for generation in rest.generator.started]
        text = rest.catalog.models()[0].tokenizer.decode(prompts[1])
        assert ["Be brief." in text, "Who are you?" in text, "I am Baton." in text, "Really?" in text] == [True] * 4
        expected = ["Be brief.", "Who are you?", "I am Baton.", "Really?", "I am Baton."]
        assert await texts(rest, made["id"]) == expected
        listed = await rest.request("GET", f"/v1/responses/{first.json['id']}/input_items?order=asc")
        assert len(listed.json["data"]) == 2


async def test_a_response_that_fails_adds_nothing(make_store):
    def fail(generation):
        generation.emit("I a")
        generation.sink.on_error(Unavailable("a worker died"))

    async with rest_side(fail, store=make_store()) as rest:
        made = await begin(rest, USER)
        await ask(rest, "Really?", made["id"])
        assert await texts(rest, made["id"]) == ["Who are you?"]


async def test_a_background_response_adds_when_it_ends(make_store):
    generator = FakeGenerator()
    async with rest_side(generator=generator, store=make_store()) as rest:
        made = await begin(rest)
        assert (await ask(rest, "Hi", made["id"], background=True)).json["conversation"] == {"id": made["id"]}
        generation = await generator.next()
        assert await texts(rest, made["id"]) == []
        say("Hello")(generation)
        await until(lambda: rest.admission.in_use == 0)
        assert await texts(rest, made["id"]) == ["Hi", "Hello"]


async def test_two_responses_at_a_time_add_whole_blocks(make_store):
    generator = FakeGenerator()
    async with rest_side(generator=generator, store=make_store()) as rest:
        made = await begin(rest, USER)
        asked = [asyncio.create_task(ask(rest, f"question {number}", made["id"])) for number in range(8)]
        for number in range(8):
            await generator.next(number)
        lengths = {len(generation.request.prompt_token_ids) for generation in generator.started}
        assert len(lengths) <= 2  # each saw the conversation as it was
        for generation in reversed(generator.started):
            say("answer")(generation)
        await asyncio.gather(*asked)
        first, *rest_of = await texts(rest, made["id"])
        assert first == "Who are you?"
        assert rest_of[1::2] == ["answer"] * 8
        assert sorted(rest_of[::2]) == [f"question {number}" for number in range(8)]


async def test_another_tenant_finds_nothing(make_store, monkeypatch):
    store = make_store()
    async with rest_side(say("x"), store=store) as rest:
        made = await begin(rest, USER)
        item = (await rest.request("GET", f"{PATH}/{made['id']}/items")).json["data"][0]["id"]
        monkeypatch.setattr("support.gateway.rest_harness.App.__init__", _as_tenant("other"))
        async with rest_side(say("x"), store=store) as other:
            one = f"{PATH}/{made['id']}"
            calls = [("GET", one, None), ("POST", one, {"metadata": {}}), ("GET", f"{one}/items", None)]
            calls += [("POST", f"{one}/items", {"items": [USER]}), ("DELETE", one, None)]
            calls += [("GET", f"{one}/items/{item}", None), ("DELETE", f"{one}/items/{item}", None)]
            for method, path, body in calls:
                assert (await other.request(method, path, body)).status == 404, (method, path)
            answer = await ask(other, "Hi", made["id"])
            assert (answer.status, answer.error["param"]) == (404, "conversation")
            assert not other.generator.started
            assert await texts(rest, made["id"]) == ["Who are you?"]


def _as_tenant(name):
    """App's constructor, with a gate that takes every client for this tenant's."""
    init = App.__init__
    return lambda app, *args, **kwargs: init(app, *args, **{**kwargs, "gate": GateOf(name)})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": [USER] * 21}, "items"),
        ({"items": [{"role": "robot", "content": "x"}]}, "items.0.role"),
        ({"items": [USER, {"type": "function_call"}]}, "items.1.call_id"),
        ({"items": [CALL | {"id": "x"}, OUTPUT | {"id": "x"}]}, "items.1.id"),
        ({"items": [{"type": "item_reference", "id": "x"}]}, "items.0.type"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": 5}}, "metadata[...]"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(fields, param):
    async with rest_side() as rest:
        made = await begin(rest)
        paths = [PATH] if "metadata" in fields else [PATH, f"{PATH}/{made['id']}/items"]
        for path in paths:
            answer = await rest.post(path, fields)
            assert answer.status == 400, answer.body
            assert answer.error["param"] in (param, param.removesuffix("[...]"))
        answer = await rest.post(f"{PATH}/{made['id']}/items", {"items": []})
        assert (answer.status, answer.error["param"]) == (400, "items")
        answer = await rest.request("GET", f"{PATH}/{made['id']}/items?limit=101")
        assert (answer.status, answer.error["param"]) == (400, "limit")


async def test_an_id_is_not_taken_twice():
    async with rest_side() as rest:
        made = await begin(rest, USER | {"id": "msg_1"})
        answer = await rest.post(f"{PATH}/{made['id']}/items", {"items": [USER | {"id": "msg_1"}]})
        assert (answer.status, answer.error["param"]) == (400, "items.0.id")


async def test_a_conversation_that_is_too_large_takes_no_more(monkeypatch):
    monkeypatch.setattr(conversation_store, "MAX_BYTES", 1000)
    async with rest_side(say("ok")) as rest:
        made = await begin(rest, {"role": "user", "content": "x" * 1000})
        answer = await rest.post(f"{PATH}/{made['id']}/items", {"items": [USER]})
        assert (answer.status, answer.error["param"]) == (400, "conversation_id")
        answer = await ask(rest, "Hi", made["id"])
        assert (answer.status, answer.error["param"]) == (400, "conversation")
        assert rest.admission.in_use == 0


async def test_items_live_as_long_as_their_conversation(make_store):
    conversations = ConversationStore(store := make_store(ttl=1.5))
    kept = await conversations.create("t", {}, [USER | {"type": "message", "id": "a"}])
    touched = await conversations.create("t", {}, [USER | {"type": "message", "id": "a"}])
    ends = time.monotonic() + 2.4
    while time.monotonic() < ends:
        await asyncio.sleep(0.1)
        await conversations.update("t", touched.id, {})
    assert len(await conversations.items("t", touched.id)) == 1
    with pytest.raises(NotFound):
        await conversations.items("t", kept.id)
    await conversations.extend("t", kept.id, [USER | {"type": "message", "id": "b"}])
    with pytest.raises(NotFound):  # what is gone does not come back half
        await conversations.items("t", kept.id)
    await store.close()


async def test_memory_counts_items_and_drops_whole_conversations():
    store = MemoryRecordStore(60, 4000)
    conversations = ConversationStore(store)
    text = {"type": "message", "role": "user", "content": "x" * 400}
    one = await conversations.create("t", {}, [])
    for number in range(3):
        await conversations.add("t", one.id, [text | {"id": str(number)}])
    assert 1200 < store.num_bytes <= 4000
    before = store.num_bytes
    await conversations.remove("t", one.id, "1")
    assert before - store.num_bytes > 400
    assert [item["id"] for item in await conversations.items("t", one.id)] == ["0", "2"]
    other = await conversations.create("t", {}, [text | {"id": str(number)} for number in range(6)])
    assert len(await conversations.items("t", other.id)) == 6
    with pytest.raises(NotFound):
        await conversations.get("t", one.id)
    assert store.num_bytes <= 4000
    await conversations.delete("t", other.id)
    assert store.num_bytes == 0
