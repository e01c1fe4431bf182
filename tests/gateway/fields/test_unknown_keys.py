"""Unknown keys of requests: found, listed in a header, and refused if configured."""

import json

import pytest
from support.gateway.rest_harness import rest_side, say

from baton.gateway.anthropic.types import MessagesRequest
from baton.gateway.bodies.unknown_fields import KnownKeys
from baton.gateway.http.cors import EXPOSED
from baton.gateway.http.ignored_fields import HEADER, header_of, ignored_tool
from baton.gateway.responses.types import ResponsesRequest
from baton.gateway.schemas.requests import ChatCompletionRequest

HI = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"type": "text", "text": "Hi"}


def found(kind, body):
    return [str(key) for key in KnownKeys(kind).unknown(json.dumps(body).encode())]


@pytest.mark.parametrize(
    ("kind", "body", "names"),
    [
        (ChatCompletionRequest, HI | {"temperature": 1}, []),
        (
            ChatCompletionRequest,
            HI | {"a": 1, "b": None, "c": [], "d": {}, "e": "", "f": False, "g": 0},
            ["a", "f", "g"],
        ),
        (ChatCompletionRequest, {"messages": [{"role": "u", "x": 1}, {"role": "u", "x": 2}]}, ["messages[0].x"]),
        (
            ChatCompletionRequest,
            {"tools": [{"type": "function", "function": {"name": "f", "paramters": {"x": 1}}}]},
            ["tools[0].function.paramters"],
        ),
        (ChatCompletionRequest, {"stream_options": {"include": True}}, ["stream_options.include"]),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "u", "content": [TEXT, TEXT | {"cache_control": {"type": "ephemeral"}}]}]},
            ["messages[0].content[1].cache_control"],
        ),
        (ChatCompletionRequest, {"messages": [{"role": "u", "content": [{"type": "image_url", "x": 1}]}]}, []),
        (
            ResponsesRequest,
            {"input": [{"role": "user", "x": 1, "content": [{"type": "input_text", "text": "Hi", "y": 1}]}]},
            ["input[0].x", "input[0].content[0].y"],
        ),
        (ResponsesRequest, {"input": [{"type": "item_reference", "id": "a", "x": 1}, {"type": "reasoning"}]}, []),
        (
            ResponsesRequest,
            {"tools": [{"type": "web_search", "x": 1}, {"type": "function", "name": "f", "defer_loading": True}]},
            ["tools[1].defer_loading"],
        ),
        (ChatCompletionRequest, {"messages": [{"role": "u"}] * 5000 + [{"x": 1}]}, ["messages[5000].x"]),
        # What is free to have any key has no unknown ones.
        (ChatCompletionRequest, {"chat_template_kwargs": {"x": 1}, "guided_json": {"x": 1}}, []),
        (ChatCompletionRequest, {"tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}}, []),
        (
            MessagesRequest,
            {"system": [TEXT], "messages": [{"role": "user", "content": [TEXT, TEXT | {"citations": [1]}]}]},
            ["messages[0].content[1].citations"],
        ),
        (MessagesRequest, {"messages": [{"role": "user", "content": [TEXT | {"cache_control": {"type": "e"}}]}]}, []),
        (ResponsesRequest, {"input": "Hi", "text": {"format": {"type": "text"}, "tone": 1}}, ["text.tone"]),
    ],
)
def test_unknown_keys_are_found_at_any_depth(kind, body, names):
    if "tool_choice" in body:
        names = ["tool_choice.function.x"]
    assert found(kind, body) == names


def test_the_search_of_a_large_body_is_bounded():
    messages = [{"role": "user", "content": "a"}] * 20_000
    assert found(ChatCompletionRequest, {"messages": [*messages, {"x": 1}]}) == ["messages[20000].x"]
    many = {f"k{number}": 1 for number in range(1000)}
    assert len(found(ChatCompletionRequest, many)) == 64


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_lists_ignored_fields(stream):
    async with rest_side(say("ok")) as rest:
        answer = await rest.chat(stream=stream, foo=1, bar=2, service_tier="flex", prediction={"type": "content"})
        assert answer.status == 200
        assert answer.headers[HEADER] == "foo, bar, prediction, service_tier"
        assert HEADER not in (await rest.chat(stream=stream)).headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/messages", HI | {"model": "storyteller-7m", "max_tokens": 5}),
        ("/v1/messages/count_tokens", HI | {"model": "storyteller-7m"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/inference/v1/generate", {"token_ids": [5]}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/conversations", {}),
    ],
)
async def test_every_route_lists_or_refuses_unknown_fields(path, body):
    async with rest_side(say("ok")) as rest:
        answer = await rest.post(path, body | {"nonsense": 1})
        assert (answer.status, answer.headers[HEADER]) == (200, "nonsense")
    async with rest_side(say("ok"), strict_fields=True) as rest:
        answer = await rest.post(path, body | {"nonsense": 1})
        assert answer.status == 400
        assert "nonsense is not a field of this request" in answer.error["message"]
        assert (await rest.post(path, body)).status == 200
        assert len(rest.generator.started) <= 1


async def test_strict_fields_suggest_the_right_name():
    async with rest_side(say("ok"), strict_fields=True) as rest:
        answer = await rest.chat(temprature=1)
        assert answer.error["param"] == "temprature"
        assert answer.error["message"].endswith("did you mean temperature?")
        tool = {"type": "function", "function": {"name": "f", "paramters": {"type": "object"}}}
        answer = await rest.chat(tools=[tool])
        assert answer.error["param"] == "tools.0.function.paramters"
        assert answer.error["message"].endswith("did you mean parameters?")
        # Known fields without effect are no reason to refuse.
        assert (await rest.chat(verbosity="low", service_tier="flex", nothing=None)).headers[HEADER] == (
            "service_tier, verbosity"
        )


async def test_hostile_names_do_not_reach_the_header():
    names = {"a\r\nset-cookie: b": 1, "é, ü": 1, "x" * 5000: 1, "": 1}
    async with rest_side(say("ok")) as rest:
        answer = await rest.chat(**names)
        assert answer.status == 200
        assert "set-cookie" not in answer.headers
        listed = answer.headers[HEADER]
        assert len(listed) < 300
        assert all("!" <= char <= "~" or char == " " for char in listed)
        assert len(listed.split(", ")) == 4
        answer = await rest.chat(**{f"field{number}": 1 for number in range(100)})
        assert answer.headers[HEADER].endswith("+48 more")


def test_the_header_is_bounded_and_pages_can_read_it():
    assert HEADER in EXPOSED
    assert header_of(["a", ignored_tool(3, "web,search")]) == "a, tools[3] (web?search)"
    assert len(header_of(["x" * 1000] * 1000)) < 1200
