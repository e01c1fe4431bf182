"""Values that ask for nothing are accepted, whatever the field."""

import pytest
from support.gateway.rest_harness import rest_side, say

NEUTRAL = [
    {"length_penalty": 1.0},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    {"tools": [], "tool_choice": "none"},
    {"functions": [], "function_call": "auto"},
    {"functions": [], "tools": []},
    {"stop": ""},
    {"stop": []},
    {"stream_options": {}},
    {"stream_options": {"include_usage": False}},
    {"n": 1, "best_of": 1},
    {"prediction": None, "audio": None, "modalities": ["text"], "web_search_options": None},
    {"logprobs": False, "top_logprobs": 0},
    {"logit_bias": {}, "bad_words": [], "stop_token_ids": [], "logprob_token_ids": []},
    {"min_p": 0, "top_k": -1, "min_tokens": 0, "presence_penalty": 0, "repetition_penalty": 1},
    {"response_format": {"type": "text"}, "service_tier": "auto"},
    {"kv_transfer_params": {}, "ec_transfer_params": None, "vllm_xargs": {}, "return_assistant_tokens_mask": False},
    {"documents": [], "metadata": {}, "chat_template_kwargs": {}},
    {"use_beam_search": True, "min_tokens": 0, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}},
    {"use_beam_search": True, "response_format": {"type": "text"}, "thinking_token_budget": -1, "best_of": 1},
]


@pytest.mark.parametrize("fields", NEUTRAL)
async def test_a_chat_with_neutral_values_is_served(fields):
    async with rest_side(say("ok")) as rest:
        generator, beams = rest.generator, fields.get("use_beam_search")
        if beams:
            generator.refusal = LookupError("it reached the generation side")
        answer = await rest.chat(**fields)
        assert "x-baton-ignored" not in answer.headers
        assert answer.status == (500 if beams else 200), answer.body


@pytest.mark.parametrize(
    "fields",
    [{"suffix": "", "prompt_embeds": None, "length_penalty": 1}, {"stop": "", "n": 1, "best_of": 1, "echo": False}],
)
async def test_a_completion_with_neutral_values_is_served(fields):
    async with rest_side(say("ok")) as rest:
        assert (await rest.complete(**fields)).status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto", "previous_response_id": "", "conversation": "", "stop": ""},
        {"include": [], "metadata": {}, "stream_options": {}, "text": {}, "reasoning": {}, "prompt": None},
        {"service_tier": "auto", "truncation": "disabled", "user": ""},
    ],
)
async def test_a_response_with_neutral_values_is_served(fields):
    async with rest_side(say("ok")) as rest:
        answer = await rest.post("/v1/responses", {"input": "Hi", **fields})
        assert (answer.status, answer.headers.get("x-baton-ignored")) == (200, None)


async def test_a_message_with_neutral_values_is_served():
    body = {"model": "storyteller-7m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    neutral = {"tools": [], "tool_choice": {"type": "auto"}, "stop_sequences": [], "mcp_servers": [], "top_k": 0}
    neutral |= {"service_tier": "auto", "metadata": {}, "system": []}
    async with rest_side(say("ok")) as rest:
        answer = await rest.post(
            "/v1/messages", body | neutral | {"service_tier": "auto", "metadata": {}, "system": []}
        )
        assert (answer.status, answer.headers.get("x-baton-ignored")) == (200, None)


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool", "function"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_only_an_assistants_message_is_continued(path, role):
    body = {"messages": [{"role": "user", "content": "Hi"}, {"role": role, "content": "Once"}]}
    async with rest_side(say("ok")) as rest:
        answer = await rest.post(path, body | {"continue_final_message": True})
        assert (answer.status, answer.error["param"]) == (400, "continue_final_message")
        body["messages"][-1]["role"] = "assistant"
        assert (await rest.post(path, body | {"continue_final_message": True})).status == 200


async def test_a_token_that_does_not_exist_has_no_text():
    async with rest_side() as rest:
        answer = await rest.post("/detokenize", {"tokens": [5, 4096, 6]})
        assert (answer.status, answer.error["param"]) == (400, "tokens.1")
        assert "below the vocabulary's size, 4096" in answer.error["message"]
        assert (await rest.post("/detokenize", {"tokens": [5, 4095]})).status == 200
        assert (await rest.post("/detokenize", {"tokens": []})).status == 200
        answer = await rest.post("/detokenize", {"tokens": [5] * 2000 + [2**31 - 1]})
        assert answer.error["param"] == "tokens.2000"
