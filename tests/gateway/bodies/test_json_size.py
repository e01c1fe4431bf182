"""JSON texts of more values than any request has are refused before an object is made of each."""

import json
import time

import msgspec
import pytest
from support.gateway.rest_harness import rest_side
from support.processes.cpu_seconds import cheapest

from baton.gateway.bodies.json_size import (
    MAX_COMMAS,
    MAX_CONTAINERS,
    MAX_KEYS,
    MAX_STRINGS,
    MAX_WIDE_BYTES,
    check_json_size,
)
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
    "exponents": b"1e308,",
    "small numbers": b"0." + b"0" * 320 + b"1,",
    "long integers": b"9" * 4000 + b",",
}


def repeated(piece):
    return b'{"messages":[{"role":"user","content":"x"}],"x":[' + piece * (MEGABYTES // len(piece)) + b"0]}"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_text_of_millions_of_values_is_refused(name):
    text = repeated(HOSTILE[name])

    def refused():
        with pytest.raises(InvalidRequest, match=r"the body has \d+ .*; at most \d+ are allowed"):
            check_json_size(text)

    assert cheapest(refused, 0.5) < 0.5


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
def test_contents_of_strings_are_not_counted(text):
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


@pytest.mark.parametrize(
    ("value", "most"),
    [
        ("1e308", 2000),
        ("-1.7976931348623157e308", 2000),
        ("8.5e-320", 2000),
        ("2.2250738585072011E-308", 2000),
        ("0." + "0" * 310 + "1", 256 * 1024 // 313),
        ("9" * 300, 256 * 1024 // 300),
    ],
)
def test_numbers_that_are_parsed_slowly_are_few(value, most):
    check_json_size(f"[{','.join([value] * most)}]".encode())
    text = f"[{','.join([value] * (most + 1))}]".encode()
    with pytest.raises(InvalidRequest, match=r"exponent|19 digits"):
        check_json_size(text)


@pytest.mark.parametrize("value", ["1.0986122886681098", "-100", "true", "false", "null", '"1e308"', "12345.25"])
def test_other_values_are_not_taken_for_them(value):
    check_json_size(f"[{','.join([value] * 100_000)}]".encode())


def test_a_text_with_nearly_as_many_of_each_kind_as_are_allowed_is_refused():
    text = json.dumps([[{}] * (MAX_CONTAINERS - 100), ["a"] * (MAX_STRINGS - 100), "\n" * 2_000_000]).encode()
    with pytest.raises(InvalidRequest, match=r"the body has .* and .*together"):
        check_json_size(text)


@pytest.mark.parametrize(
    "piece",
    [
        b"{},",
        b"1,",
        b'"",',
        b'{"type":"function","function":{"name":"a","parameters":{}}},',
        b'"a":1,',
        b"1e308,",
        b"0." + b"0" * 310 + b"1,",
        b"9" * 4000 + b",",
        rb"\u4f60",
        "a\U0001f600".encode(),
        b"a" * 100_000 + "\U0001f600".encode(),
    ],
)
def test_allowed_bodies_are_parsed_quickly(piece):
    """The parser holds the interpreter: 50 ms are those of a slow machine."""
    head, tail = (b'["', b'"]') if piece[:1] in b"\\a" else (b'{"a":0,', b'"b":0}') if b":1" in piece else (b"[", b"0]")
    count = (16 << 20) // len(piece)
    while count:
        text = head + piece * count + tail
        try:
            check_json_size(text)
            break
        except InvalidRequest:
            count = count * 9 // 10
    spent = []
    for _ in range(3):
        began = time.thread_time()
        msgspec.json.decode(text)
        spent.append(time.thread_time() - began)
    assert min(spent) < 0.05


@pytest.mark.parametrize("escape", [b"", rb"\""])
@pytest.mark.parametrize("emoji", ["\U0001f600".encode(), rb"\uD83D\ude00", rb"\ud83d\uDE00"])
def test_long_strings_with_an_emoji_are_refused_and_long_ones_without_it_are_not(escape, emoji):
    image = (b"A" * 1000 + escape) * (MAX_WIDE_BYTES // 1000)
    check_json_size(b'{"image":"%s","text":"%s"}' % (image, emoji * 1000))
    with pytest.raises(InvalidRequest, match=r"U\+FFFF; at most 10485760 are allowed"):
        check_json_size(b'{"image":"","text":"%s"}' % (image + emoji * 2000))


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
