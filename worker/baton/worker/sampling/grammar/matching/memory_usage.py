"""Estimates the memory of a matcher's automaton from the work that the grammar library reports."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from llguidance import LLMatcher

# Measured upper bounds: a state of the automaton costs a little fuel, or one byte of a text without alternatives; an
# item is one parse of the text so far.
_BYTES_PER_FUEL = 100
_BYTES_PER_ITEM = 24
_BYTES_PER_TEXT_BYTE = 640
_MAX_TEXT_BYTES = 20_000  # the automaton's maximum of states
_MAX_STATES_BYTES = 100 << 20  # of that many states
_BASE_BYTES = (1 << 20) + (1 << 17)  # after other work in the process, 42,016 bytes more than 1 MiB were seen

_NO_TOKEN = 2**32 - 1
_REPORT = re.compile(r"^Parser: (\{.*?^\})", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a matcher since its compilation, in the library's units."""

    fuel: int = 0  # spent on the automaton, by this matcher
    num_items: int = 0
    num_text_bytes: int = 0


def reported_work(matcher: LLMatcher) -> Work | None:
    """Returns the matcher's work; None if the library reports none. Takes about 0.2 ms.

    The library reports work only in errors, so this provokes one in a copy.
    """
    copy = matcher.deep_copy()
    copy.consume_token(_NO_TOKEN)
    found = _REPORT.search(copy.get_error())
    try:
        report = json.loads(found[1]) if found is not None else None
        return None if report is None else Work(report["lexer_cost"], report["all_items"], report["definitive_bytes"])
    except (ValueError, KeyError):
        return None


def grown_bytes(since: Work, now: Work) -> int:
    """Returns an upper bound of the bytes allocated between two reports."""
    states = _BYTES_PER_FUEL * max(0, now.fuel - since.fuel)
    texts = _BYTES_PER_TEXT_BYTE * min(now.num_text_bytes, _MAX_TEXT_BYTES)
    return _BASE_BYTES + min(states + texts, _MAX_STATES_BYTES) + _BYTES_PER_ITEM * now.num_items
