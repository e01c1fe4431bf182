"""SageMaker's route: the body says which route it belongs to."""

import pytest
from support.gateway.rest_harness import rest_side, say

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": MESSAGES}, "chat.completion"),
        ({"prompt": "Hi"}, "text_completion"),
        ({"token_ids": [5, 6]}, None),
        ({"input": "Hi"}, "response"),
    ],
)
async def test_a_body_is_answered_as_by_its_own_route(body, kind):
    async with rest_side(say("x")) as rest:
        answer = await rest.post("/invocations", body)
        assert (answer.status, answer.json.get("object")) == (200, kind)


async def test_streams_and_errors_are_those_of_the_route():
    async with rest_side(say("x")) as rest:
        events = (await rest.post("/invocations", {"messages": MESSAGES, "stream": True})).events
        assert events[0]["object"] == "chat.completion.chunk"
        refused = await rest.post("/invocations", {"messages": MESSAGES, "top_p": 2})
        assert (refused.status, refused.error["param"]) == (400, "top_p")


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"{}", b'{"inputs": "Hi"}', b'"messages"'])
async def test_a_body_of_no_route_is_refused(body):
    async with rest_side(say("x")) as rest:
        refused = await rest.post("/invocations", body)
        assert refused.status == 400
        assert "the body" in refused.error["message"]
        assert not rest.generator.started


async def test_tokens_only_takes_tokens_only():
    async with rest_side(say("x"), tokens_only=True) as rest:
        assert (await rest.post("/invocations", {"token_ids": [5]})).status == 200
        refused = await rest.post("/invocations", {"messages": MESSAGES})
        assert "give one of the fields token_ids" in refused.error["message"]
