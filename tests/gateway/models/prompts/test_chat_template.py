"""Chat templates, against transformers' apply_chat_template."""

import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from baton.gateway.models.files import read_model_files
from baton.gateway.models.prompts.chat_template import ChatTemplate
from baton.rpc.errors import InvalidRequest

SAMPLE = Path(__file__).parents[4] / "models" / "storyteller-7m"

HEADERS = """{{- bos_token }}
{%- if tools is not none and tools %}
    {{- "<|start_header_id|>system<|end_header_id|>\\n\\nTools: " + tools | tojson + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role in ['system', 'user', 'assistant', 'tool']) %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>' }}
    {{- '\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
TURNS = """{% macro turn(role, text) %}
<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro %}
{% set ns = namespace(last=-1, seen=[]) %}
{% for message in messages %}
  {% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{% endfor %}
{% if messages[0].role != 'system' %}{{ turn('system', 'You are helpful.') }}{% endif %}
{% for message in messages %}
  {% if message.content is string %}
    {% set content = message.content %}
  {% else %}
    {% set content = message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('') %}
  {% endif %}
  {% if message.role == 'assistant' %}
{% generation %}{{ turn(message.role, content.split('</think>')[-1].lstrip('\\n')) }}{% endgeneration %}
  {% else %}
{{ turn(message.role, content ~ (' (last)' if loop.index0 == ns.last else '')) }}
  {% endif %}
  {% if loop.index > 50 %}{% break %}{% endif %}
{% endfor %}
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""
PARTS = """{% for m in messages %}[{{ m['role'] }}]{% for part in m['content'] %}{{ part['text'] }}{% endfor %}
{% endfor %}"""

CHATS = [
    [{"role": "user", "content": "Hello  there "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "é 你好 <b>&</b>"},
        {"role": "assistant", "content": "<think>hm</think>\n\nHi"},
        {"role": "user", "content": "more"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é < >", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def oracle():
    return AutoTokenizer.from_pretrained(SAMPLE)


def template_of(source):
    files = read_model_files(str(SAMPLE))
    templates = files.chat_templates if source is None else {"default": source}
    return ChatTemplate(templates, files.special_tokens, "test")


@pytest.mark.parametrize("source", [None, HEADERS, TURNS], ids=["sample", "headers", "turns"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_prompts_equal_transformers(oracle, source, chat, add_generation_prompt, tools):
    expected = oracle.apply_chat_template(
        chat,
        tools=tools,
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        enable_thinking=False,
    )
    rendered = template_of(source).render(
        chat, tools=tools, add_generation_prompt=add_generation_prompt, variables={"enable_thinking": False}
    )
    assert rendered == expected


@pytest.mark.parametrize("source", [None, HEADERS, TURNS], ids=["sample", "headers", "turns"])
@pytest.mark.parametrize("final", ["The answer is", "The answer is "])
def test_a_continued_message_equals_transformers(oracle, source, final):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": final}]
    expected = oracle.apply_chat_template(chat, chat_template=source, continue_final_message=True, tokenize=False)
    rendered = template_of(source).render(chat, add_generation_prompt=False, continue_final_message=True)
    assert rendered == expected
    assert rendered.rstrip().endswith("The answer is")


def test_text_parts_fit_templates_of_every_kind():
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "a\nb<|eot_id|>" in template_of(HEADERS).render(parts)
    assert "ab (last)<|im_end|>" in template_of(TURNS).render(parts)
    assert template_of(PARTS).render(parts) == "[user]ab"
    assert template_of(PARTS).render([{"role": "user", "content": "ab"}]) == "[user]ab"


@pytest.mark.parametrize(
    ("chat", "options", "field"),
    [
        ([], {}, "messages"),
        ([{"role": "robot", "content": "x"}], {}, "messages"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages.0.content.0"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "messages.0.content.0.text"),
        ([{"role": "user", "content": "x"}], {"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_a_chat_that_cannot_be_rendered_names_the_field(chat, options, field):
    with pytest.raises(InvalidRequest) as caught:
        template_of(HEADERS).render(chat, **options)
    assert caught.value.field == field


HOSTILE = {
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over what is there": "{% for a in messages * 9000 %}{% for b in messages * 9000 %}{% endfor %}{% endfor %}",
    "exploding recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "doubling by ~": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "repetition": "{{ 'a' * 999999999 }}",
    "power": "{{ 9 ** 999999999 }}",
    "width": "{{ '%999999999d' % 1 }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 999999999) }}",
    "center": "{{ 'a'.center(999999999) }}",
    "center filter": "{{ 'a' | center(999999999) }}",
    "replace": "{% set a = 'a' * 99999 %}{{ a.replace('a', a) }}",
    "replace filter": "{% set a = 'a' * 99999 %}{{ a | replace('a', a) }}",
    "indent": "{{ [1] | tojson(indent=999999999) }}",
    "much output": "{% for a in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    "internals": "{{ ''.__class__.__mro__ }}{{ ().__class__.__bases__[0].__subclasses__() }}",
    "function internals": "{{ raise_exception.__globals__['x'] }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_soon_and_reaches_nothing(name):
    template = template_of(HOSTILE[name])
    begin = time.thread_time()
    with pytest.raises(InvalidRequest):
        template.render([{"role": "user", "content": "x"}])
    assert time.thread_time() - begin < 10  # of the processor, however many share it


def test_a_broken_template_is_named_with_its_line():
    with pytest.raises(InvalidRequest, match=r"invalid chat template of test \(default\) \(line 2\)"):
        template_of("ok\n{% for %}")


def test_a_model_without_template_is_an_error():
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate({}, {}, "test").render([{"role": "user", "content": "x"}])


NESTED = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(40) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)


@pytest.mark.parametrize(
    "text",
    [
        NESTED + "{{ ns.a }}",
        NESTED + "{{ ns.a | tojson }}",
        NESTED + "{{ ns.a | string }}",
        NESTED + "{{ ns.a | pprint }}",
        NESTED + "{{ [ns.a] | join }}",
        NESTED + "{{ ns.a ~ 'x' }}",
        NESTED + "{{ '%s' % ns.a }}",
        NESTED + "{{ '{}'.format(ns.a) }}",
        NESTED + "{{ '%s' | format(ns.a) }}",
        NESTED + "{{ ns.a == ns.b }}",
        NESTED + "{{ [ns.a, ns.b] | sort }}",
        "{{ (['x' * 1000000] * 1000) | join }}",
        "{{ (range(999999) | list * 16) | join('x' * 1000) }}",
        "{{ ([[1] * 100000] * 1000) | sum(start=[]) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{% set x = 'x' * 10000000 %}{% set y %}{% for i in range(9999) %}{{ x }}{% endfor %}{% endset %}",
    ],
)
def test_a_template_cannot_write_down_more_than_there_is_memory_for(text):
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate({"default": text}, {}, "m").render([{"role": "user", "content": "Hi"}])
    assert time.thread_time() - began < 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ [1, [2, {'a': 'b'}]] }}", "[1, [2, {'a': 'b'}]]"),
        ("{{ ['a', 1, none] | join('-') }}", "a-1-None"),
        ("{{ messages | map(attribute='role') | join(',') }}", "user"),
        ("{{ [{'r': 'x'}] | join('', attribute='r') }}", "x"),
        ("{{ '%s is %d' | format('a', 2) }}{{ '%(k)s' | format(k=3) }}", "a is 23"),
        ("{{ [3, 1, 2] | sort | first }}{{ [1, 2] | sum }}{{ [4, 9] | max }}", "139"),
        ("{{ messages[0] == messages[-1] }}{{ messages[0].role in ['user', 'x'] }}", "TrueTrue"),
        (
            "{{ [{'a': 1}, {'a': 1}] | groupby('a') | length }}{{ {'b': 1, 'a': 2} | dictsort }}",
            "1[('a', 2), ('b', 1)]",
        ),
    ],
)
def test_measured_filters_work_as_in_jinja(text, expected):
    assert ChatTemplate({"default": text}, {}, "m").render([{"role": "user", "content": "Hi"}]) == expected


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{% if m.content is none %}none{% endif %}", "none"),
        ("{% if m['content'] is not none %}{{ m['content'] }}{% else %}none{% endif %}", "none"),
        ("[{{ m.content | trim }}]", "[]"),
        ("{% for part in m.content %}{{ part.text }}{% endfor %}.", "."),
        (
            "{% if m.content is string %}[{{ m.content }}]{% else %}{% for part in m.content %}{% endfor %}{% endif %}",
            "[]",
        ),
    ],
)
def test_a_message_with_only_calls_has_content_for_the_template(template, content):
    source = "{% for m in messages %}" + template + "{{ m.tool_calls[0].function.name }}{% endfor %}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert ChatTemplate({"default": source}, {}, "test").render([message]) == f"{content}f"
