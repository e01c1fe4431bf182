"""The identity of a span, and how services pass it on: W3C trace context."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class SpanContext:
    """One span of a trace that is sampled."""

    trace_id: bytes  # 16 bytes
    span_id: bytes  # 8 bytes

    @property
    def traceparent(self) -> str:
        """Returns the header's value."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-01"

    def child(self) -> SpanContext:
        """Returns another span of the same trace."""
        return SpanContext(self.trace_id, _random_bytes(8))


def new_trace() -> SpanContext:
    """Returns the root of a new trace."""
    return SpanContext(_random_bytes(16), _random_bytes(8))


def sampled_context(traceparent: str) -> SpanContext | None:
    """Parses a header. Returns None if it is invalid or not sampled."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or found[1] == "ff" or not int(found[4], 16) & 1 or (found[1] == "00" and found[5]):
        return None
    context = SpanContext(bytes.fromhex(found[2]), bytes.fromhex(found[3]))
    return context if any(context.trace_id) and any(context.span_id) else None


def is_context(traceparent: str) -> bool:
    """Returns whether a header names a span, sampled or not: its sender has decided on sampling."""
    return _TRACEPARENT.fullmatch(traceparent) is not None


def _random_bytes(size: int) -> bytes:
    # Never zero, which stands for none. An id need not be secret.
    return (random.getrandbits(8 * size) or 1).to_bytes(size, "big")
