"""What a request costs before it is refused or run grows with its size, not with a product of its parts."""

import grpc
import pytest
from support.gateway.rest_harness import rest_side, say
from support.gateway.scripted_gateway import running
from support.processes.cpu_seconds import cheapest

from baton.gateway.anthropic.conversation import chat_messages
from baton.gateway.anthropic.types import InputMessage, ToolResultBlock, ToolUseBlock
from baton.gateway.bodies import decoder
from baton.gateway.fields.tools import only
from baton.gateway.parsing.tool import Tool
from baton.gateway.responses import items
from baton.rpc.errors import InvalidRequest, shortened
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub

ENOUGH = 2.0  # CPU seconds; a product of parts takes five times as many


def test_calls_and_results_are_matched_once():
    ids = [f"toolu_{index:06d}" for index in range(30_000)]
    uses = InputMessage(role="assistant", content=[ToolUseBlock(id=one, name="f", input={}) for one in ids])
    results = InputMessage(role="user", content=[ToolResultBlock(tool_use_id=one) for one in ids])
    assert cheapest(lambda: chat_messages(None, [uses, results]), ENOUGH) < ENOUGH
    with pytest.raises(InvalidRequest, match="toolu_000007 and 29992 more") as refused:
        chat_messages(None, [uses, InputMessage(role="user", content="Hi")])
    assert len(refused.value.message) < 1000


def test_items_of_one_message_are_joined_once():
    texts = [f"{index:06d}" * 150 for index in range(16_000)]
    given = [{"type": "message", "role": "assistant", "content": text} for text in texts]
    checked = items.input_items(given)
    assert cheapest(lambda: items.chat_messages(None, checked), ENOUGH) < ENOUGH
    assert items.chat_messages(None, checked) == [{"role": "assistant", "content": "".join(texts)}]


def test_allowed_tools_are_looked_up():
    tools = [Tool(f"function_{index:06d}") for index in range(20_000)]
    names = [tool.name for tool in reversed(tools)]
    assert cheapest(lambda: only(tools, names, "tool_choice"), ENOUGH) < ENOUGH
    assert [tool.place for tool in only(tools, names[:2], "tool_choice")] == [19_998, 19_999]


def test_reasoning_of_several_items_is_joined_by_lines():
    def thought(text):
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}] if text else []}

    for texts, joined in ((["", "a", "", "b"], "a\n\nb"), (["a", ""], "a\n"), (["", ""], "")):
        checked = items.input_items([*map(thought, texts), {"type": "message", "role": "assistant", "content": "Hi"}])
        assert items.chat_messages(None, checked) == [{"role": "assistant", "content": "Hi", "reasoning": joined}]


async def test_names_of_unknown_fields_are_compared_by_their_beginning(monkeypatch):
    compared = []
    monkeypatch.setattr(decoder, "get_close_matches", lambda word, known, most: compared.append(word) or [])
    async with rest_side(strict_fields=True) as rest:
        answer = await rest.post("/v1/chat/completions", {"messages": [], "temperature" * 10_000: 1})
    assert answer.status == 400
    assert [len(word) for word in compared] == [64]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_errors_repeat_the_beginning_of_what_was_sent(path):
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    body = {"model": "m" * 200_000, **({"input": "Hi"} if path == "/v1/responses" else asked)}
    async with rest_side(say("Hi")) as rest:
        answer = await rest.post(path, body)
    assert answer.status == 404
    assert len(answer.error["message"]) < 1100
    assert "`mmm" in answer.error["message"]


async def test_errors_of_grpc_fit_into_its_headers():
    async with (
        running(lambda submit: [10, 4]) as gateway,
        grpc.aio.insecure_channel(gateway.config.grpc_listen) as channel,
    ):
        request = pb.GenerateRequest(model="模" * 50_000, text="Hi")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await InferenceServiceStub(channel).Generate(request, timeout=30).read()
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    assert refused.value.details().startswith("The model `模模")


def test_long_texts_are_cut_between_characters():
    assert shortened("x" * 1024) == "x" * 1024
    for text in ("x" * 1025, "é" * 600, "\U0001f600" * 300, "\ud800" * 5000):
        cut = shortened(text)
        assert cut.endswith(" ...")
        assert len(cut.encode()) <= 1024
