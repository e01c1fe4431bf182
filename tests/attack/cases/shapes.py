"""Bodies whose shape costs: deep or wide JSON, huge lists of settings, tools, answers."""

from __future__ import annotations

import random
from typing import Any

from attack.cases.case import (
    CHATS,
    COUNT_TOKENS,
    DETOKENIZE,
    GENERATE,
    MESSAGES,
    RESPONSES,
    TEXTS,
    TOKENIZE,
    Delivery,
    Draft,
    chat,
    large,
    prompt_fields,
)
from attack.cases.texts import filling

_PATHS = (CHATS, TEXTS, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE, DETOKENIZE, GENERATE)


def raw_json(rng: random.Random) -> Draft:
    """Draws JSON of a shape that parsers dislike."""
    size = large(rng)
    piece = rng.choice((b"{},", b"[],", b'"",', b"1,", b"null,", b"[", b'{"a":', b'{"a":1},', b"1e9,", b'"\\u0000",'))
    filled = piece * (size // len(piece))
    head = b'{"messages":[{"role":"user","content":"x"}],"prompt":"x","input":"x","max_tokens":4,'
    form = rng.randrange(5)
    if form == 0:
        body = filled
    elif form == 1:
        body = head + b'"x":[' + filled + b"1]}"
    elif form == 2:
        body = b"{" + b",".join(b'"k%d":%d' % (index, index) for index in range(size // 16)) + b"}"
    elif form == 3:
        body = head + b'"temperature":' + b"9" * size + b"}"
    else:
        depth = rng.choice((100, 1000, 100_000, size // 2))
        body = head + b'"metadata":' + b"[" * depth + b"]" * depth + b"}"
    return Draft(rng.choice(_PATHS), body, streamed=False, note=f"{piece!r} form {form}")


def binary(rng: random.Random) -> Draft:
    """Draws bytes that are no JSON."""
    size = large(rng)
    body = rng.choice((b"\x00", b"\xff", b"\xf0\x9f\x98", b" ", b"\xef\xbb\xbf", b"--x\r\n", b'"')) * (size // 2)
    return Draft(rng.choice(_PATHS), body, streamed=False)


def tools(rng: random.Random) -> Draft:
    """Draws long lists of tools, or tools of large schemas."""
    count = rng.choice((1, 10, 128, 1000, 50_000))
    each = max(1, large(rng) // count)
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    kind = rng.randrange(3)
    if kind == 0:
        parameters["properties"] = {f"p{index}": {"type": "string"} for index in range(each // 30)}
    elif kind == 1:
        parameters["description"] = filling(rng, each)
    else:
        parameters["properties"] = {"a": {"enum": [f"v{index}" for index in range(each // 8)]}}
    listed = [
        {"type": "function", "function": {"name": f"f{index}", "parameters": parameters, "strict": rng.random() < 0.3}}
        for index in range(count)
    ]
    choice: Any = rng.choice(("auto", "required", {"type": "function", "function": {"name": "f0"}}))
    return chat(tools=listed, tool_choice=choice)


def lists(rng: random.Random) -> Draft:
    """Draws huge lists of stops, bad words, biases or token ids."""
    size = large(rng)
    kind = rng.choice(("stop", "bad_words", "logit_bias", "logprob_token_ids", "stop_token_ids", "allowed_token_ids"))
    each = rng.choice((1, 10, 1000, size))
    if kind in ("stop", "bad_words"):
        text = filling(rng, each)
        value: Any = [f"{index}{text}" for index in range(max(1, size // (each + 8)))]
    elif kind == "logit_bias":
        value = {str(index): rng.choice((1, -100, 1e308)) for index in range(size // 10)}
    else:
        value = list(range(size // 8))
    return chat(**{kind: value}, max_tokens=1)


def answers(rng: random.Random) -> Draft:
    """Draws requests for large answers: choices, beams, log-probabilities."""
    many = rng.choice((1, 8, 128, 129, 10**6))
    fields: dict[str, Any] = {"max_tokens": rng.choice((1, 100, 400, 1500, 10**9)), "ignore_eos": True}
    streamed = rng.random() < 0.4
    kind = rng.randrange(4)
    path = rng.choice((CHATS, TEXTS))
    if kind == 0:
        fields |= {"n": many, "logprobs": True if path == CHATS else 20, "top_logprobs": 20}
    elif kind == 1:
        fields |= {"use_beam_search": True, "n": min(many, 64), "best_of": min(many, 64)}
    elif kind == 2:
        fields |= {"n": many, "best_of": many}
    else:
        fields |= {"prompt_logprobs": rng.choice((0, 20, 1000)), "n": many}
    prompt = filling(rng, rng.choice((10, 1000, 10_000)))
    if streamed:
        fields["stream"] = True
    return Draft(path, {**prompt_fields(path, prompt), **fields}, streamed, note=f"n {many}")


def transport(rng: random.Random) -> Draft:
    """Draws headers and ways of sending that cost."""
    kind = rng.randrange(5)
    fields = prompt_fields(CHATS, filling(rng, rng.choice((10, 2000)))) | {"stream": True, "max_tokens": 1}
    if kind == 0:
        count = rng.choice((10, 100, 1000, 100_000))
        return Draft(CHATS, fields, headers=tuple((f"x-{index}", "v") for index in range(count)), note="headers")
    if kind == 1:
        return Draft(CHATS, fields, headers=(("x-long", "v" * rng.choice((100, 30_000, 10**6))),), note="header")
    delivery = (Delivery.CHUNKED, Delivery.SLOW, Delivery.HALF_CLOSED)[kind - 2]
    if delivery is Delivery.CHUNKED:
        fields = prompt_fields(CHATS, "a" * rng.choice((10, 10_000, 200_000))) | {"max_tokens": 1}
    return Draft(CHATS, fields, delivery=delivery, note=delivery.value, streamed="stream" in fields)
