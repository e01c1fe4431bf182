"""The result of a check: one fact about one topic, its severity, and how to fix it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """The severity; its value is shown."""

    OK = "ok"
    UNKNOWN = "unknown"  # it could not be checked here
    WARNING = "warning"  # it works, but badly or not for long
    FAILED = "failed"  # it does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report."""

    topic: str
    level: Level
    what: str
    fix: str = ""  # a command, a flag, or advice; empty if nothing is to be done


def ok(topic: str, what: str) -> Finding:
    """Returns a finding without a problem."""
    return Finding(topic, Level.OK, what)


def unknown(topic: str, what: str, fix: str = "") -> Finding:
    """Returns a finding that could not be checked."""
    return Finding(topic, Level.UNKNOWN, what, fix)


def warning(topic: str, what: str, fix: str) -> Finding:
    return Finding(topic, Level.WARNING, what, fix)


def failed(topic: str, what: str, fix: str) -> Finding:
    return Finding(topic, Level.FAILED, what, fix)
