"""Chat templates made at random: each renders a text or is refused, soon, and reaches nothing but the chat."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.gateway.models.prompts.chat_template import ChatTemplate
from baton.rpc.errors import InvalidRequest

CHAT = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": None, "tool_calls": []}]
# Of Python, about what Jinja makes of them.
pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")
FUZZ = settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))

ATOMS = [
    "messages", "messages[0]", "messages[-1].content", "tools", "bos_token", "add_generation_prompt", "x", "y", "none",
    "true", "0", "1", "-1", "1e308", "99999", "'a'", "'%s'", "'{0.__class__}'", "''", "[]", "{}", "[1, 'b', none]",
    "{'a': [1], 'b': 'c'}", "range(9)", "range(99999)", "namespace(a=1)", "dict(a=1)", "cycler(1, 2)", "joiner()",
    "lipsum", "raise_exception", "strftime_now", "self", "loop", "caller", "varargs", "messages.__class__", "x._y",
]  # fmt: skip
FILTERS = [
    "abs", "attr('__class__')", "batch(2)", "batch(0)", "capitalize", "center(9999)", "default(1)", "dictsort",
    "escape", "filesizeformat", "first", "float", "forceescape", "format(1)", "groupby('a')", "indent(9999)", "int",
    "items", "join('x')", "last", "length", "list", "lower", "map('upper')", "map(attribute='role')", "max", "min",
    "pprint", "random", "reject('none')", "rejectattr('a')", "replace('a', 'aa')", "reverse", "round", "safe",
    "select('string')", "selectattr('role', 'equalto', 'user')", "slice(3)", "slice(0)", "sort", "string", "striptags",
    "sum", "title", "tojson", "tojson(indent=9999)", "trim", "truncate(3)", "unique", "upper", "urlencode", "urlize",
    "wordcount", "wordwrap(0)", "xmlattr", "no_such_filter",
]  # fmt: skip
METHODS = [
    "append(1)", "split('a')", "split('')", "format(x)", "format_map({})", "items()", "keys()", "get('a')", "pop()",
    "join(messages)", "encode()", "translate({97: 'b' * 99})", "zfill(9999)", "count('')", "startswith(('a', 1))",
    "__init__()", "mro()", "clear()", "splitlines()", "title()", "replace('', 'ab')",
]  # fmt: skip
BINARY = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "not in", "and", "or", "is sameas"]
TESTS = ["defined", "string", "mapping", "iterable", "none", "divisibleby(0)", "sequence", "number", "no_such_test"]


def larger(inner):
    return st.one_of(
        st.tuples(inner, st.sampled_from(FILTERS)).map(lambda pair: f"({pair[0]}) | {pair[1]}"),
        st.tuples(inner, st.sampled_from(METHODS)).map(lambda pair: f"({pair[0]}).{pair[1]}"),
        st.tuples(inner, st.sampled_from(BINARY), inner).map(lambda three: f"({three[0]}) {three[1]} ({three[2]})"),
        st.tuples(inner, st.sampled_from(TESTS)).map(lambda pair: f"({pair[0]}) is {pair[1]}"),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]})[{pair[1]}]"),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]})[{pair[1]}:]"),
        st.tuples(inner, inner, inner).map(lambda three: f"({three[0]}) if ({three[1]}) else ({three[2]})"),
        st.tuples(inner, inner).map(lambda pair: f"[{pair[0]}, {pair[1]}]"),
        inner.map(lambda one: f"({one})()"),
    )


EXPRESSIONS = st.recursive(st.sampled_from(ATOMS), larger, max_leaves=6)


def longer(inner):
    return st.one_of(
        st.tuples(EXPRESSIONS, inner).map(lambda pair: f"{{% for x in {pair[0]} %}}{pair[1]}{{% endfor %}}"),
        st.tuples(EXPRESSIONS, inner).map(lambda pair: f"{{% if {pair[0]} %}}{pair[1]}{{% endif %}}"),
        st.tuples(EXPRESSIONS, inner).map(lambda pair: f"{{% set y = {pair[0]} %}}{pair[1]}"),
        inner.map(lambda one: f"{{% set y %}}{one}{{% endset %}}{{{{ y ~ y }}}}"),
        inner.map(lambda one: f"{{% macro m(x) %}}{one}{{% endmacro %}}{{{{ m(m(1)) }}}}"),
        inner.map(lambda one: f"{{% macro m(x) %}}{one}{{{{ m(x) }}}}{{% endmacro %}}{{{{ m(1) }}}}"),
        inner.map(lambda one: f"{{% for x in messages recursive %}}{one}{{{{ loop([x]) }}}}{{% endfor %}}"),
        inner.map(lambda one: f"{{% filter upper %}}{one}{{% endfilter %}}"),
        inner.map(lambda one: f"{{% generation %}}{one}{{% endgeneration %}}"),
        st.tuples(inner, inner).map("".join),
    )


TEMPLATES = st.recursive(EXPRESSIONS.map(lambda one: f"{{{{ {one} }}}}"), longer, max_leaves=5)


def check(source):
    began = time.process_time()
    try:
        text = ChatTemplate({"default": source}, {"bos_token": "<s>"}, "random").render(CHAT, tools=[{"a": 1}])
    except InvalidRequest:
        text = ""
    assert isinstance(text, str)
    assert "<class" not in text, source
    assert time.process_time() - began < 20, source


DEEP = {
    "loops": "{% for a in x %}" * 30 + "{% endfor %}" * 30,
    "conditions": "{% if a %}" * 200 + "{% endif %}" * 200,
    "parentheses": "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "signs": "{{ " + "-" * 5000 + "1 }}",
    "attributes": "{{ a" + ".b" * 5000 + " }}",
    "digits": "{{ " + "9" * 5000 + " }}",
}


@pytest.mark.parametrize("source", DEEP.values(), ids=DEEP)
def test_a_template_that_no_compiler_takes_is_named(source):
    with pytest.raises(InvalidRequest, match=r"invalid chat template of random \(default\)"):
        ChatTemplate({"default": source}, {}, "random")


@FUZZ
@given(TEMPLATES)
def test_a_random_template_renders_or_is_refused(source):
    check(source)


@FUZZ
@given(st.text(alphabet="{}%#-|()[].'\"~ax1 \n", max_size=40) | st.text(max_size=20).map("{{{{ {} }}}}".format))
def test_random_text_is_a_template_or_is_refused(source):
    check(source)
