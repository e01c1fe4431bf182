"""The wall clock, which certificates, key expiry, and the order of spans and logs depend on."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from baton.services.doctor.finding import Finding, ok, unknown, warning

_TOPIC = "clock"
_MOST_SECONDS = 1.0
_UNSYNCHRONIZED = 5  # TIME_ERROR
_TIMEX_BYTES = 512  # more than any version of the structure


@dataclass(frozen=True, slots=True)
class ClockFacts:
    """The state of the clock. None is unknown."""

    synchronized: bool | None  # as the kernel reports
    redis_offset: float | None = None  # seconds that Redis' clock is ahead of this one


def check_clock(facts: ClockFacts) -> Iterator[Finding]:
    """Checks the clock against Redis and the kernel's state."""
    if facts.synchronized is None:
        yield unknown(_TOPIC, "the kernel does not report whether the clock is synchronized")
    elif facts.synchronized:
        yield ok(_TOPIC, "it is kept in step (NTP)")
    else:
        fix = "timedatectl set-ntp true   (in a container: on its node)"
        yield warning(_TOPIC, "it is not synchronized and may drift from the other machines'", fix)
    if facts.redis_offset is not None and abs(facts.redis_offset) > _MOST_SECONDS:
        what = f"Redis' clock is {abs(facts.redis_offset):.1f} s {'ahead' if facts.redis_offset > 0 else 'behind'}"
        yield warning(_TOPIC, what, "timedatectl status, here and on Redis' machine")


def observe_clock(redis_offset: float | None) -> ClockFacts:
    """Reads the kernel's clock state."""
    if not sys.platform.startswith("linux"):
        return ClockFacts(None, redis_offset)
    try:
        state: int = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return ClockFacts(None, redis_offset)
    return ClockFacts(None if state < 0 else state != _UNSYNCHRONIZED, redis_offset)
