"""What a chat template may cost: CPU time of its thread, whatever it repeats."""

import time

import pytest
from support.gateway.rest_harness import SAMPLE

from baton.gateway.models.prompts.chat_template import ChatTemplate
from baton.gateway.models.prompts.template_sandbox import MAX_CPU_SECONDS
from baton.gateway.models.served import load_served_model
from baton.rpc.errors import InvalidRequest

COSTLY = {
    "products": "{% for a in range(9999) %}{% for b in range(9999) %}{{ a * b }}{% endfor %}{% endfor %}",
    "texts": "{% for a in range(140000) %}{{ 'x' ~ a ~ 'y' ~ a }}{{ a | string | upper | trim }}{% endfor %}",
    "macros": "{% macro m(a) %}{{ a }}{% endmacro %}{% for a in range(140000) %}{{ m(a) }}{{ m(a) }}{% endfor %}",
    "namespaces": "{% set n = namespace(a=0) %}"
    "{% for a in range(140000) %}{% set n.a = (a ~ 'x' ~ n.a) | upper | length %}{% endfor %}",
    "calls": "{% for a in range(140000) %}{{ 'a b c'.split(' ') | join('-') | replace('-', a | string) }}{% endfor %}",
}
SAID = {"role": "user", "content": "a"}


@pytest.mark.parametrize("name", COSTLY)
def test_a_template_is_stopped_soon(name):
    template = ChatTemplate({"default": COSTLY[name]}, {}, "a test")
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"CPU time|loop iterations"):
        template.render([SAID], add_generation_prompt=True)
    assert time.thread_time() - began < MAX_CPU_SECONDS + 0.1


def test_time_before_a_rendering_does_not_count():
    template = ChatTemplate({"default": "{% for a in range(1000) %}{{ a }}{% endfor %}"}, {}, "a test")
    until = time.thread_time() + MAX_CPU_SECONDS + 0.05
    template.render([SAID], add_generation_prompt=True)
    while time.thread_time() < until:
        pass
    assert template.render([SAID], add_generation_prompt=True).startswith("0123")


def test_a_long_chat_of_a_real_template_is_within_the_limit():
    model = load_served_model(str(SAMPLE))
    prompt = model.template.render([SAID] * 4000, add_generation_prompt=True)
    assert prompt.count("user\na") == 4000
