"""Server-sent events in OpenAI's form, as bytes. What is alike in all events of a stream is made once."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import orjson

from baton.gateway.errors.http import HttpError
from baton.gateway.schemas.answers import Usage

CONTENT_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"

json_text = orjson.dumps  # a str as a JSON string, in UTF-8


def error_event(error: HttpError) -> bytes:
    """What ends a stream whose head is already out."""
    return b"data: %b\n\n%b" % (error.body, DONE)


def with_id(events: bytes, name: str) -> bytes:
    """The events, the last one with an id: who has it has all of them."""
    start = events.rfind(b"\n\n", 0, len(events) - 2) + 2 if events.count(b"\n\n") > 1 else 0
    return b"%bid: %b\n%b" % (events[:start], name.encode(), events[start:])


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all chunks of one stream have in common."""

    object: str
    id: str
    created: int
    model: str
    system_fingerprint: str
    include_usage: bool = False  # OpenAI then says "usage": null in every chunk but the last
    continuous_usage: bool = False  # the usage so far in every chunk

    @property
    def head(self) -> bytes:
        """Up to the first choice."""
        fields = {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }
        return b'data: %b,"choices":[' % orjson.dumps(fields)[:-1]

    @property
    def tail(self) -> bytes:
        """After the last choice."""
        return b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"

    def tail_with(self, usage: Usage) -> bytes:
        """After the last choice, with a usage."""
        return b'],"usage":%b}\n\n' % msgspec.json.encode(usage)
