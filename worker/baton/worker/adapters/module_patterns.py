"""Regular expressions of adapter_config.json, of which any can be matched in a moment.

A match holds up the whole engine, and some expressions take hours for the name of a module. Those repeat something that
repeats itself, or have many repetitions in a row.
"""

from __future__ import annotations

import re

MAX_LENGTH = 256
MAX_REPETITIONS = 4
_REPETITION = re.compile(r"(?<!\\)(?:\\\\)*[*+{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")


def problem_of(pattern: str) -> str:
    """Returns what is wrong with an expression; empty: nothing."""
    if len(pattern) > MAX_LENGTH:
        return f"has {len(pattern)} characters; at most {MAX_LENGTH} are allowed"
    if _REPEATED_GROUP.search(pattern):
        return "repeats a group, which may take hours to match"
    repetitions = len(_REPETITION.findall(pattern))
    if repetitions > MAX_REPETITIONS:
        return f"has {repetitions} repetitions; at most {MAX_REPETITIONS} are allowed"
    try:
        re.compile(pattern)
    except re.error as error:
        return f"is no regular expression: {error}"
    return ""
