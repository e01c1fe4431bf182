"""Tool calls in a chat's history: templates of every class render them, whatever a model wrote as arguments."""

import json

import pytest
from support.gateway.rest_harness import RawClient
from support.gateway.scripted_gateway import model_folder
from support.gateway.tools_rig import QWEN, TOOLS, rig

from baton.gateway.fields.chat import template_messages
from baton.gateway.models.prompts.call_arguments import read_arguments
from baton.gateway.models.prompts.chat_template import ChatTemplate
from baton.gateway.responses.items import chat_messages
from baton.gateway.schemas.requests import ChatMessage
from baton.rpc.errors import InvalidRequest

LOOP = "{% for m in messages %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"
BROKEN = '{"city": "Par'

# How the models' own templates write arguments: an object's rendering, and that of a text that is no JSON.
TEMPLATES = {
    "Qwen 2.5, Llama 3": (
        "{{ call.function.name }}({{ call.function.arguments | tojson }})",
        'f({"city": "Paris", "n": true})',
        "f(" + json.dumps(BROKEN) + ")",
    ),
    "Qwen 3": (
        "{{ call.function.name }}({% if call.function.arguments is string %}{{ call.function.arguments }}"
        "{% else %}{{ call.function.arguments | tojson }}{% endif %})",
        'f({"city": "Paris", "n": true})',
        f"f({BROKEN})",
    ),
    "DeepSeek": (
        "{{ call['function']['name'] + '(' + call['function']['arguments'] + ')' }}",
        'f({"city": "Paris", "n": true})',
        f"f({BROKEN})",
    ),
    "a text joined with ~": (
        "{{ call.function.name ~ '(' ~ call.function.arguments ~ ')' }}",
        'f({"city": "Paris", "n": true})',
        f"f({BROKEN})",
    ),
    "Qwen 3 Coder": (
        "{{ call.function.name }}({% for key, value in call.function.arguments | items %}<{{ key }}>{{ value }}"
        "{% endfor %})",
        "f(<city>Paris<n>True)",
        f"f(<input>{BROKEN})",
    ),
    "GLM 4.5": (
        "{{ call.function.name }}({% set _args = call.function.arguments %}{% for k, v in _args.items() %}<{{ k }}>"
        "{{ v | tojson if v is not string else v }}{% endfor %})",
        "f(<city>Paris<n>true)",
        f"f(<input>{BROKEN})",
    ),
    "a template that skips what is no mapping": (
        "{{ call.function.name }}({% if call.function.arguments is mapping %}{% for k, v in "
        "call.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}{% endif %})",
        "f(<city>Paris<n>True)",
        f"f(<input>{BROKEN})",
    ),
}


def chat_with(arguments):
    call = {"id": "c12345678", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize("model", TEMPLATES)
def test_every_class_of_template_renders_objects_and_texts(model):
    body, of_object, of_text = TEMPLATES[model]
    template = ChatTemplate({"default": LOOP + body + END}, {}, "test")
    assert template.render(chat_with(read_arguments('{"city": "Paris", "n": true}'))) == "Hi." + of_object
    assert template.render(chat_with(read_arguments(BROKEN))) == "Hi." + of_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        (" \n", {}),
        ("null", {}),
        ("[1]", "[1]"),
        ('"a"', '"a"'),
        ("{", "{"),
        ("a=1", "a=1"),
    ],
)
def test_arguments_that_are_no_object_stay_text(text, expected):
    assert read_arguments(text) == expected


def test_a_template_that_takes_no_calls_refuses_them_as_before():
    template = ChatTemplate({"default": "{% for m in messages %}{{ m.content }};{% endfor %}"}, {}, "test")
    assert template.render(chat_with("{")) == "Hi.;;"


@pytest.fixture
async def qwen(tmp_path):
    async with rig(model_folder(tmp_path / "qwen", QWEN)) as made:
        yield made


@pytest.mark.parametrize("arguments", [BROKEN, "[1]", "just text"])
async def test_chats_and_responses_take_arguments_that_are_no_object(qwen, arguments):
    calls = [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}]
    messages = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "error: no JSON"},
    ]
    await qwen.chat("Sorry.", messages=messages, tools=TOOLS)
    written = f'"arguments": {json.dumps(arguments)}}}</tool_call>'
    assert written in qwen.prompt()
    items = [
        {"type": "message", "role": "user", "content": "Hi."},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "error: no JSON"},
    ]
    async with RawClient.connect(qwen.gateway.port) as client:
        answer = await client.request("POST", "/v1/responses", {"input": items})
    assert answer.status == 200
    assert written in qwen.prompt()


async def test_an_older_function_call_too(qwen):
    call = {"name": "get_weather", "arguments": BROKEN}
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": None, "function_call": call}]
    await qwen.chat("Sorry.", messages=messages)
    assert json.dumps(BROKEN) in qwen.prompt()


MANY = json.dumps({"a": ["b"] * 200_000})


def history(*texts):
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": text}} for text in texts]
    return [ChatMessage(role="assistant", tool_calls=calls)]


@pytest.mark.parametrize(
    "texts", [[MANY], [json.dumps({"a": list(range(1000))})] * 140, ['{"a":[' + "1e308," * 3000 + "1]}"]]
)
def test_values_of_all_calls_together_are_bounded(texts):
    with pytest.raises(InvalidRequest, match=r"values|exponent") as caught:
        template_messages(history(*texts))
    assert caught.value.field == "messages"
    items = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": text} for text in texts]
    with pytest.raises(InvalidRequest):
        chat_messages(None, items)


def test_code_in_arguments_is_not_counted():
    code = json.dumps({"path": "a.py", "content": 'print([1, 2, {"a": 3}]), f(x, y), "\\n"\n' * 20_000})
    (message,) = template_messages(history(code, code, *(['{"a": 1, "b": [2]}'] * 10_000)))
    assert len(message["tool_calls"]) == 10_002
