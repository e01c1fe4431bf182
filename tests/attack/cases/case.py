"""One hostile request, and the vocabulary that the families share."""

from __future__ import annotations

import enum
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BODY_LIMIT = 16_777_216  # --max-body-bytes

CHATS = "/v1/chat/completions"
TEXTS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
GENERATE = "/inference/v1/generate"


class Delivery(enum.Enum):
    """How the bytes of a request arrive."""

    WHOLE = "whole"
    CHUNKED = "chunks of one byte"
    SLOW = "slow"
    HALF_CLOSED = "half-closed"


@dataclass(frozen=True, slots=True)
class Case:
    """A request that tries to cost much. Its number alone makes it again."""

    number: int
    family: str
    path: str
    body: bytes = field(repr=False)
    streamed: bool = True  # else the answer is whole: it ends long after its first token
    delivery: Delivery = Delivery.WHOLE
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    note: str = ""

    @property
    def name(self) -> str:
        """Returns what identifies the case in a table."""
        return f"{self.number} {self.family} {self.path} {len(self.body):,} B {self.note}".rstrip()


@dataclass(frozen=True, slots=True)
class Draft:
    """What a family draws: fields as JSON, or the bytes themselves."""

    path: str
    fields: Mapping[str, Any] | bytes
    streamed: bool = True
    delivery: Delivery = Delivery.WHOLE
    headers: tuple[tuple[str, str], ...] = ()
    note: str = ""

    def encoded(self) -> bytes:
        """Returns the body; one beyond the limit is cut, which makes it invalid JSON of the largest size."""
        if isinstance(self.fields, bytes):
            return self.fields[:BODY_LIMIT]
        # A lone surrogate has no UTF-8: it travels as an escape.
        return json.dumps(self.fields).encode()[:BODY_LIMIT]


def large(rng: random.Random, most: int = 16_000_000) -> int:
    """Returns a size, as likely of each order of magnitude, and often the largest."""
    if rng.random() < 0.15:
        return most
    return min(most, int(10 ** rng.uniform(2, 7.3)))


def generating(rng: random.Random, prompt: object, **fields: Any) -> Draft:
    """Returns a request for a first token of this prompt, on any route that takes text."""
    path = rng.choice((CHATS, CHATS, TEXTS, RESPONSES, MESSAGES))
    return Draft(path, {**prompt_fields(path, prompt), "stream": True, **fields})


def prompt_fields(path: str, prompt: object) -> dict[str, Any]:
    """Returns the fields that carry a prompt on this route."""
    messages = [{"role": "user", "content": prompt}]
    return {
        CHATS: {"messages": messages},
        TEXTS: {"prompt": prompt},
        RESPONSES: {"input": prompt},
        MESSAGES: {"messages": messages, "max_tokens": 4},
        COUNT_TOKENS: {"messages": messages},
        TOKENIZE: {"prompt": prompt},
    }[path]


def chat(prompt: object = "x", **fields: Any) -> Draft:
    """Returns a streamed chat."""
    return Draft(CHATS, {"messages": [{"role": "user", "content": prompt}], "stream": True, **fields})
