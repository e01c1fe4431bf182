"""What a check says: one fact about one topic, how bad it is, and the line that mends it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """How bad it is; the value is what is shown."""

    OK = "ok"
    UNKNOWN = "unknown"  # it could not be looked at here
    WARNING = "warning"  # it works, badly or not for long
    FAILED = "failed"  # it does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report."""

    topic: str
    level: Level
    what: str
    fix: str = ""  # a command, a flag, or what else to do; empty where nothing is to be done


def ok(topic: str, what: str) -> Finding:
    """All is well."""
    return Finding(topic, Level.OK, what)


def unknown(topic: str, what: str, fix: str = "") -> Finding:
    """It could not be looked at."""
    return Finding(topic, Level.UNKNOWN, what, fix)


def warning(topic: str, what: str, fix: str) -> Finding:
    """It works, badly or not for long."""
    return Finding(topic, Level.WARNING, what, fix)


def failed(topic: str, what: str, fix: str) -> Finding:
    """It does not work."""
    return Finding(topic, Level.FAILED, what, fix)
