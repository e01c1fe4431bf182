"""Server-sent events in OpenAI's form, as bytes. The common parts of a stream's events are encoded once."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import orjson
from msgspec import UNSET, UnsetType

from baton.gateway.errors.http import HttpError
from baton.gateway.schemas.answers import RequestMetrics, Usage

CONTENT_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"

json_text = orjson.dumps  # encodes a str as a JSON string in UTF-8


def error_event(error: HttpError) -> bytes:
    """Returns the events that end a stream with an error."""
    return b"data: %b\n\n%b" % (error.body, DONE)


def with_id(events: bytes, name: str) -> bytes:
    """Adds an id to the last event: a client that has it has all of them."""
    start = events.rfind(b"\n\n", 0, len(events) - 2) + 2 if events.count(b"\n\n") > 1 else 0
    return b"%bid: %b\n%b" % (events[:start], name.encode(), events[start:])


@dataclass(frozen=True, slots=True)
class Envelope:
    """The common members of all chunks of a stream."""

    object: str
    id: str
    created: int
    model: str
    system_fingerprint: str
    include_usage: bool = False  # adds "usage": null to every chunk except the last, as OpenAI does
    continuous_usage: bool = False  # adds the current usage to every chunk
    with_metrics: bool = False  # adds the request's times to the last usage

    @property
    def head(self) -> bytes:
        """Returns the bytes before the first choice."""
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
        """Returns the bytes after the last choice."""
        return b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"

    def tail_with(self, usage: Usage, metrics: RequestMetrics | UnsetType = UNSET) -> bytes:
        """Returns the bytes after the last choice, with a usage."""
        times = b"" if metrics is UNSET else b',"metrics":%b' % msgspec.json.encode(metrics)
        return b'],"usage":%b%b}\n\n' % (msgspec.json.encode(usage), times)
