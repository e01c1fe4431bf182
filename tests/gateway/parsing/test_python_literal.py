"""Python literals as JSON: each text is parsed as by Python, or refused."""

import ast
import json

from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway.parsing_harness import cut, parse, tool_parser

LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(value=LITERALS, seed=st.integers(0, 2**16))
def test_reprs_are_parsed_as_by_python(value, seed):
    parsed = parse(tool_parser("pythonic"), cut(f"[get_time(a={value!r})]", seed))
    ((name, arguments),) = parsed.calls
    assert name == "get_time"
    assert json.loads(arguments) == {"a": ast.literal_eval(repr(value))}
