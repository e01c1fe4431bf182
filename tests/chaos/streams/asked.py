"""The requests of a chaos run: kinds whose answers depend on all that a failover has to carry over. Pure."""

from __future__ import annotations

import random
import statistics
from typing import Any

NUM_REQUESTS = 28  # different ones
_WORDS = ("dog", "river", "girl", "tree", "boat", "king", "bird", "moon")
_NUM_WORDS = 120
_NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}, "minItems": 30, "maxItems": 30}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "numbers", "strict": True, "schema": _NUMBERS}}
_ARGUMENTS = {"type": "object", "properties": {"numbers": _NUMBERS}, "required": ["numbers"]}
_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": _ARGUMENTS}}]
_SEEDED: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "seeded": _SEEDED,
    "two choices": {**_SEEDED, "n": 2},
    "JSON schema": {"temperature": 1.0, "response_format": _SCHEMA},
    "tool call": {"temperature": 1.0, "tools": _TOOLS, "tool_choice": "required"},
    "log-probabilities": {**_SEEDED, "logprobs": True, "top_logprobs": 2},
    "penalties": {**_SEEDED, "presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
}
_NAMES = tuple(KINDS)
MEAN_CHOICES = statistics.mean(kind.get("n", 1) for kind in KINDS.values())


def kind_of(number: int) -> str:
    """Which kind a request is of."""
    return _NAMES[number % len(_NAMES)]


def body_of(number: int, model: str, max_tokens: int) -> dict[str, Any]:
    """One of the requests, the same each time."""
    words = random.Random(number).choices(_WORDS, k=_NUM_WORDS)
    fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    fields |= {"seed": number, "max_tokens": max_tokens, **KINDS[kind_of(number)]}
    return {**fields, "messages": [{"role": "user", "content": " ".join(words)}]}


def long_body(number: int, model: str, max_tokens: int) -> dict[str, Any]:
    """Returns a request that fills much of a pool. Its answer is not compared."""
    words = random.Random(number).choices(_WORDS, k=400)
    fields = {"model": model, "prompt": f"{number} " + " ".join(words), "temperature": 0.0, "ignore_eos": True}
    return {**fields, "max_tokens": max_tokens}
