"""Several conversations in one request."""

import asyncio

import pytest
from support.gateway.rest_harness import rest_side, say

PATH = "/v1/chat/completions/batch"
CHATS = [[{"role": "user", "content": text}] for text in ("Hi", "A dog", "Tell me")]


async def test_each_conversation_gets_its_own_choice():
    async with rest_side() as rest:
        request = asyncio.create_task(rest.post(PATH, {"messages": CHATS, "return_token_ids": True}))
        await rest.generator.next(2)
        for number, one in reversed(list(enumerate(rest.generator.started))):
            one.emit(f"answer {number}")
            one.finish()
            one.done(completion_tokens=2)
        answer = (await request).json
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["answer 0", "answer 1", "answer 2"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert [choice["token_ids"] for choice in answer["choices"]] == [[7]] * 3
        assert answer["usage"]["completion_tokens"] == 6
        prompts = [one.request.prompt_token_ids for one in rest.generator.started]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
        assert len({one.request.request_id for one in rest.generator.started}) == 3
    async with rest_side(say("x")) as rest:
        for chat, prompt in zip(CHATS, prompts, strict=True):
            await rest.post("/v1/chat/completions", {"messages": chat})
            assert rest.generator.started[-1].request.prompt_token_ids == prompt


async def test_one_failure_ends_the_whole_batch():
    async with rest_side() as rest:
        request = asyncio.create_task(rest.post(PATH, {"messages": CHATS}))
        await rest.generator.next(2)
        rest.generator.started[1].sink.on_error(RuntimeError("broken"))
        assert (await request).status == 500
        assert rest.generator.started[0].aborted.is_set()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "messages.0"),
        ({"messages": [CHATS[0], []]}, "messages.1"),
        ({"messages": [CHATS[0], [{"role": "user"}]]}, "messages.1.0.content"),
        ({"messages": CHATS * 2}, "messages"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"store": True}, "store"),
        ({"top_p": 3}, "top_p"),
    ],
)
async def test_what_a_batch_does_not_have_is_refused(fields, param):
    async with rest_side(say("x"), max_prompts=3) as rest:
        refused = await rest.post(PATH, {"messages": CHATS, **fields})
        assert (refused.status, refused.error["param"]) == (400, param), refused.body
        assert not rest.generator.started


async def test_neutral_values_are_accepted_and_ignored_fields_listed_once():
    async with rest_side(say("x")) as rest:
        body = {"messages": CHATS, "n": 1, "stream": False, "tools": [], "tool_choice": "none", "verbosity": "low"}
        answer = await rest.post(PATH, body)
        assert (answer.status, answer.headers["x-baton-ignored"]) == (200, "verbosity")
