"""JSON texts of more values than any request has are refused before an object is made of each."""

import json
import time

import pytest
from rest_harness import rest_side

from baton.gateway.json_size import MAX_COMMAS, MAX_CONTAINERS, MAX_KEYS, MAX_STRINGS, check_json_size
from baton.rpc.errors import InvalidRequest

MEGABYTES = 15 << 20
HOSTILE = {
    "objects": b"{},",
    "arrays": b"[],",
    "keys": b'"a" :1,',
    "strings": b'"",',
    "numbers": b"1,",
    "escapes": rb'"\\",{},',
    "objects after quotes": rb'"\\\"",[],',
    "escaped characters": rb'"\u0000",',
    "a string of escapes": rb"\ufeff",
}


def repeated(piece):
    return b'{"messages":[{"role":"user","content":"x"}],"x":[' + piece * (MEGABYTES // len(piece)) + b"0]}"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_text_of_millions_of_values_is_refused(name):
    began = time.process_time()
    with pytest.raises(InvalidRequest, match=r"The body has \d+ .*; at most \d+ are allowed"):
        check_json_size(repeated(HOSTILE[name]))
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    "text",
    [
        'if (a[0] == "x\\y") { return {"a": [1, 2, 3]}; } // 12:30:45, ',
        "{[:,",
        '\\"{',
        '"' * 3 + "{",
        "\\\\{[",
        "\n{\t",
    ],
)
def test_what_stands_in_a_string_is_not_counted(text):
    for ascii_only in (False, True):
        body = json.dumps({"a": text * (2_000_000 // len(text)), "b": [text] * 3}, ensure_ascii=ascii_only)
        check_json_size(body.encode())
        with pytest.raises(InvalidRequest):
            check_json_size(json.dumps([json.loads(body), [{}] * MAX_CONTAINERS]).encode())


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ([[]] * (MAX_CONTAINERS - 1), True),
        ([[]] * (MAX_CONTAINERS + 1), False),
        ({str(number): 1 for number in range(MAX_KEYS)}, True),
        ({str(number): 1 for number in range(MAX_KEYS + 1)}, False),
        ([1] * MAX_COMMAS, True),
        ([1] * (MAX_COMMAS + 2), False),
        (["a"] * MAX_STRINGS, True),
        (["a"] * (MAX_STRINGS + 1), False),
    ],
)
def test_the_limits_are_exact(value, fits):
    text = json.dumps(value).encode()
    if fits:
        check_json_size(text)
        return
    with pytest.raises(InvalidRequest):
        check_json_size(text)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/messages"])
async def test_every_route_refuses_them(path):
    async with rest_side() as rest:
        answer = await rest.post(path, repeated(b"{},"), headers={"anthropic-version": "2023-06-01"})
        assert answer.status == 400
        assert "objects and arrays" in answer.error["message"]
        assert (await rest.post(path, b"[" * MEGABYTES, headers={"anthropic-version": "2023-06-01"})).status == 400


@pytest.mark.parametrize(("field", "value"), [("stop", ["a"] * 2000), ("bad_words", ["a"] * 20_000)])
async def test_long_lists_are_refused_by_name(field, value):
    async with rest_side() as rest:
        answer = await rest.chat(**{field: value})
        assert (answer.status, answer.error["param"]) == (400, field)
