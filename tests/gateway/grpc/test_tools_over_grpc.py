"""Tools and reasoning over the public gRPC API: a real client, a whole gateway, an engine whose tokens are scripted."""

import json
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_status import rpc_status
from support.gateway.scripted_gateway import model_folder, running

from baton.gateway.core import Delta
from baton.gateway.grpc.deltas import responses_of
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.gateway.parsing.events import CallArguments, CallEnd, CallStart, ContentText, ReasoningText
from baton.v1 import inference_pb2 as pb
from baton.v1 import types_pb2
from baton.v1.inference_pb2_grpc import InferenceServiceStub

QWEN = """{%- if tools %}Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %} in <tool_call></tool_call>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
{{ call.id }}:{{ call.function.name }}({{ call.function.arguments | tojson }})
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{{- reasoning_effort }}{% endif %}"""
THOUGHT = "<think>\nHm.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCHEMA = json.dumps({"type": "object", "properties": {"city": {"type": "string"}}})
TOOLS = [pb.Tool(name="get_weather", description="The weather.", parameters_schema=SCHEMA), pb.Tool(name="get_time")]
QUESTION = [pb.ChatMessage(role="user", content="What is the weather?")]


class Rig:
    """A stub, and the worker's next output."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.says = ""
        self.gateway = None
        self.stub = None

    def script(self, submit):
        return [*self.tokenizer.encode(self.says, add_special_tokens=False), 4]

    async def generate(self, says, messages=QUESTION, n=1, **chat):
        self.says = says
        request = pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages, **chat), n=n)
        return [response async for response in self.stub.Generate(request, timeout=20)]

    def prompt(self):
        return self.tokenizer.decode(self.gateway.worker.submits[-1].prompt_token_ids)


@asynccontextmanager
async def rig(tmp_path):
    folder = model_folder(tmp_path / "qwen", QWEN)
    made = Rig(Tokenizer(folder / "tokenizer.json"))
    gateway_running = running(made.script, model=folder, served_model_name=("storyteller-7m",))
    async with gateway_running as gateway, grpc.aio.insecure_channel(gateway.config.grpc_listen) as channel:
        made.gateway, made.stub = gateway, InferenceServiceStub(channel)
        yield made
    made.tokenizer.close()


@pytest.fixture
async def qwen(tmp_path):
    async with rig(tmp_path) as made:
        yield made


def calls_of(responses, index=0):
    calls = {}
    for response in responses:
        for delta in response.tool_calls if response.index == index else ():
            assert (delta.index in calls) != bool(delta.id)
            call = calls.setdefault(delta.index, [delta.name, ""])
            call[1] += delta.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


async def test_reasoning_text_and_calls_are_separated(qwen):
    *pieces, last = await qwen.generate(THOUGHT + "I look.\n" + CALL, tools=TOOLS)
    assert "".join(piece.reasoning for piece in pieces) == "Hm."
    assert "".join(piece.text for piece in pieces) == "I look."
    assert calls_of(pieces) == [("get_weather", {"city": "Paris"})]
    assert pieces[-1].finish_reason == types_pb2.FINISH_REASON_TOOL_CALLS
    assert last.usage.reasoning_tokens > 0
    assert last.usage.completion_tokens == sum(len(piece.token_ids) for piece in pieces)


async def test_calls_and_reasoning_go_back_in(qwen):
    messages = [
        *QUESTION,
        pb.ChatMessage(
            role="assistant",
            reasoning="Hm.",
            tool_calls=[pb.ToolCall(id="c1", name="get_weather", arguments='{"city": "Paris"}'), pb.ToolCall(name="g")],
        ),
        pb.ChatMessage(role="tool", tool_call_id="c1", content="sunny"),
    ]
    await qwen.generate("Sunny.", messages, tools=TOOLS)
    assert '<think>Hm.</think>c1:get_weather({"city": "Paris"}):g({})' in qwen.prompt()
    assert '{"type": "function", "function": {"name": "get_weather", "description": "The weather."' in qwen.prompt()


async def test_arguments_that_are_no_json_go_back_in_as_text(qwen):
    call = pb.ToolCall(id="c1", name="get_weather", arguments='{"city": "Par')
    messages = [
        pb.ChatMessage(role="user", content="Hi."),
        pb.ChatMessage(role="assistant", tool_calls=[call]),
        pb.ChatMessage(role="tool", tool_call_id="c1", content="error"),
    ]
    await qwen.generate("Sorry.", messages)
    assert r'c1:get_weather("{\"city\": \"Par")' in qwen.prompt()


async def test_switches_reach_the_template_and_the_answer(qwen):
    none = pb.ToolChoice(mode=pb.TOOL_MODE_NONE)
    pieces = await qwen.generate(CALL, tools=TOOLS, tool_choice=none)
    assert "".join(piece.text for piece in pieces) == CALL
    assert "get_weather" not in qwen.prompt()
    pieces = await qwen.generate(THOUGHT + CALL * 2, tools=TOOLS, disable_parallel_tool_calls=True, omit_reasoning=True)
    assert calls_of(pieces) == [("get_weather", {"city": "Paris"})]
    assert not any(piece.reasoning for piece in pieces)
    variables = {"enable_thinking": pb.TemplateValue(flag=False)}
    pieces = await qwen.generate("x", template_variables=variables)
    assert qwen.prompt().endswith("<think></think>")
    await qwen.generate("x", reasoning_effort=pb.REASONING_EFFORT_HIGH)
    assert qwen.prompt().endswith("high")


async def test_a_named_function_constrains_the_worker(qwen):
    pieces = await qwen.generate(
        '{"city": "Paris"}', tools=TOOLS, tool_choice=pb.ToolChoice(function_name="get_weather")
    )
    assert calls_of(pieces) == [("get_weather", {"city": "Paris"})]
    assert pieces[-2].finish_reason == types_pb2.FINISH_REASON_STOP
    assert (
        qwen.gateway.worker.submits[-1].constraint.json_schema
        == '{"type":"object","properties":{"city":{"type":"string"}}}'
    )


async def test_every_choice_has_calls_of_its_own(qwen):
    pieces = await qwen.generate(CALL, tools=TOOLS, n=2)
    assert calls_of(pieces, 0) == calls_of(pieces, 1) == [("get_weather", {"city": "Paris"})]


async def test_a_text_prompt_is_answered_in_plain_text(qwen):
    qwen.says = THOUGHT + CALL
    call = qwen.stub.Generate(pb.GenerateRequest(text="Hi"), timeout=20)
    assert "".join([piece.text async for piece in call]) == THOUGHT + CALL


async def test_tokenize_takes_tools(qwen):
    await qwen.generate("x", tools=TOOLS)
    chat = pb.ChatPrompt(messages=QUESTION, tools=TOOLS)
    answer = await qwen.stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=10)
    assert list(answer.token_ids) == list(qwen.gateway.worker.submits[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        ({"tools": [pb.Tool(name="a b")]}, "chat.tools.0.name"),
        ({"tools": [pb.Tool(name="f", parameters_schema="{")]}, "chat.tools.0.parameters_schema"),
        ({"tools": [pb.Tool(name="f", parameters_schema="[]")]}, "chat.tools.0.parameters_schema"),
        ({"tool_choice": pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)}, "chat.tool_choice"),
        ({"tools": TOOLS, "tool_choice": pb.ToolChoice(mode=17)}, "chat.tool_choice.mode"),
        ({"tools": TOOLS, "tool_choice": pb.ToolChoice(function_name="x")}, "chat.tool_choice.function_name"),
        ({"tool_choice": pb.ToolChoice(function_name="x")}, "chat.tool_choice"),
        ({"reasoning_effort": 99}, "chat.reasoning_effort"),
        ({"template_variables": {str(n): pb.TemplateValue() for n in range(257)}}, "chat.template_variables"),
        (
            {"messages": [pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall()])]},
            "chat.messages.0.tool_calls.0.name",
        ),
    ],
)
async def test_wrong_fields_are_named(qwen, chat, field):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await qwen.generate("x", **chat)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(refused.value)
    assert any(f'field: "{field}"' in str(detail) or field.encode() in detail.value for detail in status.details)
    assert not qwen.gateway.worker.submits


def test_one_response_keeps_the_order_of_its_parts():
    events = [
        ReasoningText("r"),
        ContentText("t"),
        CallStart(0, "c0", "f"),
        CallArguments(0, "{"),
        CallArguments(0, "}"),
        CallEnd(0),
        CallStart(1, "c1", "g"),
        CallEnd(1),
        ContentText("u"),
    ]
    first, second = responses_of("id", Delta(0, "", (7,), None, "tool_calls", "stop", events))
    assert (first.reasoning, first.text, list(first.token_ids)) == ("r", "t", [7])
    assert [(call.index, call.id, call.arguments) for call in first.tool_calls] == [(0, "c0", "{}"), (1, "c1", "")]
    assert first.finish_reason == types_pb2.FINISH_REASON_UNSPECIFIED
    assert (second.text, second.stop_string, list(second.token_ids)) == ("u", "stop", [])
    assert second.finish_reason == types_pb2.FINISH_REASON_TOOL_CALLS
