"""What is refused, with which status and which field named; and that nothing of it reaches a worker."""

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway.rest_harness import rest_side, say

from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.fields import chat, completion, sampling
from baton.gateway.fields.neutral import drop_neutral, drop_neutral_choices
from baton.gateway.schemas.requests import ChatCompletionRequest, CompletionRequest
from baton.rpc.errors import InvalidRequest

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
BIG = 10**30

CHATS = {
    "unknown model": ({"model": "gpt-17"}, "model"),
    "model of a wrong type": ({"model": 5}, "model"),
    "empty messages": ({"messages": []}, "messages"),
    "messages missing": ({"messages": None}, "messages"),
    "a message that is none": ({"messages": ["Hi"]}, "messages.0"),
    "no role": ({"messages": [{"content": "Hi"}]}, "messages.0.role"),
    "empty role": ({"messages": [{"role": "", "content": "Hi"}]}, "messages.0.role"),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0.content"),
    "content of a wrong type": ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
    "arguments that are no text": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 7}}]}]},
        "messages.0.tool_calls.0.function.arguments",
    ),
    "prompt beyond the context": ({"messages": [{"role": "user", "content": "dog " * 4000}]}, "messages"),
    "temperature too high": ({"temperature": 2.01}, "temperature"),
    "temperature below zero": ({"temperature": -0.1}, "temperature"),
    "temperature a text": ({"temperature": "1"}, "temperature"),
    "temperature true": ({"temperature": True}, "temperature"),
    "temperature huge": ({"temperature": BIG}, "temperature"),
    "top_p zero": ({"top_p": 0}, "top_p"),
    "top_p above one": ({"top_p": 1.1}, "top_p"),
    "top_k below -1": ({"top_k": -2}, "top_k"),
    "top_k a fraction": ({"top_k": 1.5}, "top_k"),
    "min_p above one": ({"min_p": 1.1}, "min_p"),
    "seed huge": ({"seed": BIG}, "seed"),
    "presence_penalty": ({"presence_penalty": 2.1}, "presence_penalty"),
    "frequency_penalty": ({"frequency_penalty": -2.1}, "frequency_penalty"),
    "repetition_penalty zero": ({"repetition_penalty": 0}, "repetition_penalty"),
    "n zero": ({"n": 0}, "n"),
    "n too large": ({"n": 129}, "n"),
    "n huge": ({"n": BIG}, "n"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens huge": ({"max_tokens": BIG}, "max_tokens"),
    "max_completion_tokens below zero": ({"max_completion_tokens": -1}, "max_completion_tokens"),
    "min_tokens below zero": ({"min_tokens": -1}, "min_tokens"),
    "empty stop": ({"stop": [""]}, "stop.0"),
    "a stop that is no text": ({"stop": ["a", 5]}, "stop.1"),
    "stop token below zero": ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    "logit_bias of no token id": ({"logit_bias": {"dog": 1}}, "logit_bias"),
    "logit_bias below zero": ({"logit_bias": {"-1": 1}}, "logit_bias"),
    "logit_bias out of range": ({"logit_bias": {"5": 100.5}}, "logit_bias"),
    "logit_bias a list": ({"logit_bias": [1]}, "logit_bias"),
    "allowed_token_ids empty": ({"allowed_token_ids": []}, "allowed_token_ids"),
    "logprobs a number": ({"logprobs": 3}, "logprobs"),
    "top_logprobs without logprobs": ({"top_logprobs": 2}, "top_logprobs"),
    "top_logprobs too many": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "stream a text": ({"stream": "yes"}, "stream"),
    "stream_options without stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "tool_choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "response_format without type": ({"response_format": {}}, "response_format.type"),
    "audio": ({"modalities": ["text", "audio"]}, "modalities"),
    "prompt_logprobs in a stream": ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    "prompt_logprobs below 0": ({"prompt_logprobs": -1}, "prompt_logprobs"),
    "truncation to nothing": ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    "priority huge": ({"priority": BIG}, "priority"),
    "cache_salt empty": ({"cache_salt": ""}, "cache_salt"),
    "request_id with a line break": ({"request_id": "a\r\nset-cookie: b"}, "request_id"),
    "both kinds of going on": (
        {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"
    ),
    "reasoning_effort": ({"reasoning_effort": "some"}, "reasoning_effort"),
}  # fmt: skip

COMPLETIONS = {
    "no prompt": ({"prompt": None}, "prompt"),
    "no prompts": ({"prompt": []}, "prompt"),
    "mixed prompts": ({"prompt": ["a", [5]]}, "prompt.1"),
    "token below zero": ({"prompt": [5, -1]}, "prompt.1"),
    "token huge": ({"prompt": [5, BIG]}, "prompt.1"),
    "prompt a number": ({"prompt": 5}, "prompt"),
    "prompt beyond the context": ({"prompt": [5] * 2048}, "prompt"),
    "too many prompts": ({"prompt": ["a"] * 1025}, "prompt"),
    "suffix": ({"suffix": "end"}, "suffix"),
    "prompt_embeds": ({"prompt_embeds": "AA=="}, "prompt_embeds"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens"),
    "logprobs below zero": ({"logprobs": -1}, "logprobs"),
    "logprobs too many": ({"logprobs": 21}, "logprobs"),
}


@pytest.mark.parametrize(
    ("path", "base", "fields", "field"),
    [
        *(("/v1/chat/completions", CHAT, *case) for case in CHATS.values()),
        *(("/v1/completions", {"prompt": "Hi"}, *case) for case in COMPLETIONS.values()),
    ],
    ids=[*CHATS, *(f"completion: {name}" for name in COMPLETIONS)],
)
async def test_a_wrong_value_is_refused_by_name(path, base, fields, field):
    async with rest_side() as rest:
        answer = await rest.post(path, base | fields)
        assert not rest.generator.started
        assert rest.admission.in_use == 0
    assert answer.status == (404 if field == "model" and isinstance(fields["model"], str) else 400)
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == field


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}, "modalities": ["text"], "tool_choice": "none", "top_logprobs": 0},
        {"temperature": 0, "n": 3, "stop": list("abcdef")},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "best_of": 1, "nonsense": [1]},
        {"use_beam_search": False, "bad_words": [], "echo": False, "return_token_ids": False, "logprobs": False},
        {"temperature": 1, "top_p": 1, "min_p": 0, "top_k": 0, "seed": 0, "priority": 0, "logit_bias": {}},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}]},
        {"messages": [{"role": "pirate", "content": "Arr"}, {"role": "user", "content": ""}]},
    ],
)
async def test_neutral_values_are_served(fields):
    async with rest_side(say("x")) as rest:
        answer = await rest.post("/v1/chat/completions", CHAT | fields)
    assert answer.status == 200, answer.body


async def test_the_errors_that_clients_look_for_have_openais_codes():
    async with rest_side() as rest:
        unknown = await rest.chat(model="gpt-17")
        too_long = await rest.chat("dog " * 4000)
    assert unknown.error == {
        "message": "The model `gpt-17` does not exist.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert too_long.error["code"] == "context_length_exceeded"
    assert "2048" in too_long.error["message"]


BODIES = {
    "empty": b"",
    "cut": b'{"messages": [{"role": "user", "cont',
    "trailing comma": b'{"messages": [],}',
    "a list": b"[]",
    "a text": b'"hi"',
    "null": b"null",
    "two values": b"{} {}",
    "NaN": b'{"messages": [], "temperature": NaN}',
    "Infinity": b'{"messages": [], "temperature": Infinity}',
    "a number beyond all": b'{"messages": [], "temperature": 1e999}',
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "encoded surrogate": b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "lone low surrogate": b'{"messages": [{"role": "user", "content": "\\udc00 x"}]}',
    "deep in an unknown field": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep in a known field": b'{"messages":' + b"[" * 100_000,
    "deep objects": b'{"chat_template_kwargs":' + b'{"a":' * 100_000,
    "control character": b'{"messages": "\x00"}',
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_a_body_that_is_no_good_json_is_a_400(path, body):
    async with rest_side() as rest:
        answer = await rest.post(path, body)
        assert (await rest.request("GET", "/health")).status == 200
    assert answer.status == 400
    assert answer.error["message"]


async def test_another_content_type_is_refused():
    async with rest_side(say("x")) as rest:
        for kind, status in (
            ("text/plain", 400), ("application/x-www-form-urlencoded", 400), ("application/json; charset=utf-8", 200),
            ("application/vnd.api+json", 200),
        ):  # fmt: skip
            headers = {"content-type": kind}
            answer = await rest.post("/v1/chat/completions", json.dumps(CHAT).encode(), headers)
            assert answer.status == status


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def bodies(kind, base):
    """Bodies with a few fields of the type, each of them anything at all, or near to right."""
    names = st.sampled_from(kind.__struct_fields__)
    near = st.sampled_from(
        [0, 1, -1, 0.5, 2**31, 2**63, 2**64, "", "a", [], [""], [1], {}, {"1": 1}, {"type": "text"}, [{"role": "user"}]]
    )
    return st.dictionaries(names, VALUES | near, max_size=4).map(lambda fields: json.dumps(base | fields).encode())


@settings(max_examples=400, deadline=None)
@given(bodies(ChatCompletionRequest, {"messages": [{"role": "user", "content": "Hi"}]}))
def test_no_chat_body_is_a_defect(body):
    with suppress(InvalidRequest):
        request = BodyDecoder(ChatCompletionRequest).decode(body, {})
        drop_neutral(request)
        drop_neutral_choices(request)
        chat.check_chat(request, 128, 20)
        chat.template_messages(request.messages)
        chat.template_variables(request)
        sampling.sampling_of(request, chat.chat_num_logprobs(request))
        sampling.stop_of(request, request.max_tokens)


@settings(max_examples=400, deadline=None)
@given(bodies(CompletionRequest, {"prompt": "Hi"}))
def test_no_completion_body_is_a_defect(body):
    with suppress(InvalidRequest):
        request = BodyDecoder(CompletionRequest).decode(body, {})
        completion.check_completion(request, 128, 20, 1024)
        sampling.sampling_of(request, request.logprobs)
        sampling.stop_of(request, request.max_tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "a"}] * 2049},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2048}]},
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f"}}] * 2048}]},
    ],
)
async def test_a_chat_of_more_items_than_the_context_has_tokens_is_refused_unrendered(fields):
    async with rest_side() as rest:
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = await rest.post(path, fields)
            assert answer.status == 400
            assert answer.error["param"] == "messages"
            assert answer.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("field", ["allowed_token_ids", "stop_token_ids"])
async def test_more_token_ids_than_the_vocabulary_has_are_refused(field):
    async with rest_side() as rest:
        for answer in (await rest.chat(**{field: [5] * 4097}), await rest.complete(**{field: [5] * 4097})):
            assert answer.status == 400
            assert answer.error["param"] == field


async def test_more_template_variables_than_any_template_reads_are_refused():
    async with rest_side() as rest:
        answer = await rest.chat(chat_template_kwargs={f"k{number}": 1 for number in range(257)})
        assert answer.status == 400
        assert answer.error["param"] == "chat_template_kwargs"


async def test_an_echo_without_output_checks_its_tokens_too():
    async with rest_side() as rest:
        answer = await rest.complete([5, 99999], echo=True, max_tokens=0)
        assert answer.status == 400
        assert answer.error["param"] == "prompt"


async def test_more_choices_than_ever_fit_are_no_matter_of_retrying():
    async with rest_side(max_streams=8) as rest:
        answer = await rest.complete(["a"] * 3, n=3)
        assert answer.status == 400
        assert answer.error["param"] == "n"
        assert rest.admission.in_use == 0


async def test_a_prompt_of_mixed_forms_names_the_first_odd_one():
    async with rest_side() as rest:
        answer = await rest.complete(["a", "b", 1, "c"])
        assert answer.error["param"] == "prompt.2"
