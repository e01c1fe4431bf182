"""Prompts that are hard to tokenize, render or detokenize."""

from __future__ import annotations

import json
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
    Draft,
    chat,
    large,
    prompt_fields,
)

_PIECES = (
    "1234567890", "a", "A", " ", "\n", "\t", "hello there ", "你好世界", "e\u0301\u0301\u0301", "\U0001f600",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "<|im_end|>\n<|im_start|>system\n", "<|endoftext|>", "</think>",
    "<tool_call>", "{}[],:", '\\"', "\u0000", "\ud800", "\ufeff", "\u202e", "㐀|", "{{ x }}", "{% for x in y %}",
    "a\u0300" * 3, "ﷺ", "\u00ad", "aaaaaaab", "0" * 50 + ".",
)  # fmt: skip
_PROMPT_PATHS = (CHATS, TEXTS, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE)


def filling(rng: random.Random, size: int) -> str:
    """Returns text of about `size` bytes as JSON."""
    if rng.random() < 0.15:
        size = min(size, 2_000_000)  # random draws cost this program time
        return "".join(rng.choices("".join(_PIECES[:14]), k=size // 4))
    piece = rng.choice(_PIECES) + rng.choice(("", "", "", rng.choice(_PIECES)))
    return piece * max(1, size // len(json.dumps(piece)[1:-1].encode()))


def prompts(rng: random.Random) -> Draft:
    """Draws one enormous prompt."""
    path = rng.choice(_PROMPT_PATHS)
    fields: dict[str, Any] = prompt_fields(path, filling(rng, large(rng)))
    if path not in (COUNT_TOKENS, TOKENIZE):
        fields["stream"] = True
    if path in (CHATS, TEXTS) and rng.random() < 0.3:
        fields["truncate_prompt_tokens"] = rng.choice((-1, 1, 100))
    if path == RESPONSES and rng.random() < 0.3:
        fields["truncation"] = "auto"
    if path == TOKENIZE:
        fields["return_token_strs"] = rng.random() < 0.5
    return Draft(path, fields)


def many_messages(rng: random.Random) -> Draft:
    """Draws a long conversation, or one message of many parts."""
    size = large(rng)
    text = rng.choice(("", "a", filling(rng, 200)))
    path = rng.choice((CHATS, CHATS, MESSAGES, COUNT_TOKENS, RESPONSES))
    if rng.random() < 0.5:
        kind = "input_text" if path == RESPONSES else "text"
        parts = [{"type": kind, "text": text}] * max(1, size // (30 + len(text)))
        messages = [{"role": "user", "content": parts}]
    else:
        roles = rng.choice((("user",), ("user", "assistant"), ("system",), ("tool", "user"), ("<|im_end|>",)))
        turns = max(1, size // (40 + len(text)))
        messages = [{"role": roles[index % len(roles)], "content": text} for index in range(turns)]
    fields: dict[str, Any] = {"input" if path == RESPONSES else "messages": messages}
    if path == MESSAGES:
        fields |= {"max_tokens": 4, "stream": True}
    elif path != COUNT_TOKENS:
        fields["stream"] = True
    return Draft(path, fields)


def batches(rng: random.Random) -> Draft:
    """Draws many prompts in one request."""
    size = large(rng)
    count = rng.choice((2, 64, 1024, 5000, 100_000))
    if rng.random() < 0.4:
        prompt: list[Any] = [[rng.randrange(4000) for _ in range(20)] * max(1, size // count // 100)] * count
    else:
        prompt = [filling(rng, max(1, size // count))] * count
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "stream": True}
    if rng.random() < 0.3:
        fields |= {"echo": True, "logprobs": 5}
    return Draft(TEXTS, fields, note=f"{count} prompts")


def ids(rng: random.Random) -> Draft:
    """Draws token ids, as a prompt or to turn into text."""
    count = large(rng) // 5
    token = rng.choice((0, 1, 7, 700, 4095, 2**31, -1, 2**70))
    path = rng.choice((DETOKENIZE, DETOKENIZE, TEXTS, GENERATE))
    tokens = [token] * count
    if path == DETOKENIZE:
        return Draft(path, {"tokens": tokens})
    if path == GENERATE:
        return Draft(path, {"token_ids": tokens, "sampling_params": {"max_tokens": 1}, "stream": True})
    return Draft(path, {"prompt": tokens, "max_tokens": 1, "stream": True})


def template_variables(rng: random.Random) -> Draft:
    """Draws what a chat template receives."""
    count = large(rng) // 12
    kind = rng.randrange(4)
    if kind == 0:
        return chat(chat_template_kwargs=dict.fromkeys(map(str, range(count)), 1))
    if kind == 1:
        return chat(documents=[{"title": "t", "text": filling(rng, 100)}] * max(1, count // 10))
    if kind == 2:
        return chat(chat_template_kwargs={"messages": filling(rng, count), "enable_thinking": [[]] * 1000})
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}"
    return chat(chat_template=rng.choice((loop, "{{ 'a' * 999999999 }}", "{{" * (count // 2), filling(rng, count))))
