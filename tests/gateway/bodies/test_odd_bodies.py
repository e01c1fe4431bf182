"""Every field of every generating route with values of every kind: served, or refused by name; never a defect."""

import json

import pytest
from support.gateway.rest_harness import RawClient, rest_side, say

from baton.gateway.anthropic.types import CountTokensRequest, MessagesRequest
from baton.gateway.openai.batched_chat import BatchChatCompletionRequest
from baton.gateway.openai.rendering.types import DerenderChatRequest, DerenderCompletionRequest
from baton.gateway.openai.token_generate import TokenGenerateRequest
from baton.gateway.responses.types import ResponsesRequest
from baton.gateway.schemas.requests import ChatCompletionRequest, CompletionRequest

CHAT = [{"role": "user", "content": "Hi"}]
ANSWER = {"request_id": "a", "choices": [{"index": 0, "token_ids": [5], "finish_reason": "stop"}]}
DEEP = json.loads("[" * 200 + "]" * 200)
ODD = [
    0, -1, 1.5, 2**31, 2**63, -(2**63), True, "", "x", "\x00\ud7ff\U0001f600", "x" * 5000, [], [0], ["x"],
    [None], [[1]], [{}],
    [{"type": "function"}], [{"type": []}], [{"type": "text", "text": 1}], {}, {"type": "x"}, {"x": {"y": []}},
    {"-1": 5}, {"type": "function", "function": {}}, {"type": "json_schema"}, {"type": "enabled"}, DEEP,
]  # fmt: skip
ROUTES = {
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": CHAT}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hi"}),
    "/v1/chat/completions/batch": (BatchChatCompletionRequest, {"messages": [CHAT]}),
    "/v1/chat/completions/render": (ChatCompletionRequest, {"messages": CHAT}),
    "/v1/chat/completions/derender": (DerenderChatRequest, {"model": "storyteller-7m", "generate_response": ANSWER}),
    "/v1/completions/render": (CompletionRequest, {"prompt": "Hi"}),
    "/v1/completions/derender": (
        DerenderCompletionRequest,
        {"model": "storyteller-7m", "generate_responses": [ANSWER]},
    ),
    "/v1/responses": (ResponsesRequest, {"input": "Hi"}),
    "/v1/messages": (MessagesRequest, {"model": "storyteller-7m", "messages": CHAT, "max_tokens": 4}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"model": "storyteller-7m", "messages": CHAT}),
    "/inference/v1/generate": (TokenGenerateRequest, {"token_ids": [5]}),
}


@pytest.mark.parametrize("path", ROUTES)
async def test_no_value_of_any_field_is_a_defect(path):
    kind, body = ROUTES[path]
    async with rest_side(say("x")) as rest:
        for field in kind.__struct_fields__:
            async with RawClient.connect(rest.port) as client:
                for value in ODD:
                    if value is True and field in ("background", "use_beam_search"):  # this model ends neither
                        continue
                    answer = await client.request("POST", path, {**body, field: value})
                    assert answer.status in (200, 400, 404), (field, value, answer.status, answer.body)
                    if answer.status != 200:
                        assert answer.error["message"], (field, value)
        assert rest.admission.in_use == 0


ITEMS = [
    {"type": "message"}, {"role": "user", "content": ["x"]},
    {"role": "assistant", "content": [{"type": "output_text"}]},
    {"type": "function_call", "call_id": 1}, {"type": "function_call_output", "call_id": "a", "output": 5},
    {"type": "reasoning", "summary": [{"type": "x"}]}, {"type": "reasoning", "content": "x"},
    {"type": "item_reference"},
    {"role": "user", "content": "x", "id": 5}, {"role": "user", "content": [{"type": "refusal", "refusal": "no"}]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "status": []},
]  # fmt: skip


@pytest.mark.parametrize("item", ITEMS)
async def test_no_item_is_a_defect(item):
    async with rest_side(say("x")) as rest:
        answer = await rest.post("/v1/responses", {"input": [{"role": "user", "content": "Hi"}, item]})
        if answer.status == 200:
            follow = await rest.post("/v1/responses", {"input": "Go on", "previous_response_id": answer.json["id"]})
            assert follow.status == 200
        else:
            assert answer.status == 400
            assert answer.error["param"].startswith("input.1")
