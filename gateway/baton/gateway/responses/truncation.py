"""Which items of a conversation that is too long are kept: the instructions, and as many of the latest as fit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from baton.gateway.responses.items import OUTPUTS, Item

T = TypeVar("T")
Unit = list[Item]


async def longest_that_fits(items: Sequence[Item], tried: Callable[[list[Item]], Awaitable[T | None]]) -> T | None:
    """Drops the fewest of the oldest units for which `tried` returns a value, and returns that; None: none does.

    What instructs the model stays, and the last unit does. Dropping more never makes a conversation longer, so the
    number is searched by halves.
    """
    pinned, units = _split(items)
    low, high, best = 1, len(units) - 1, None
    while low <= high:
        middle = (low + high) // 2
        kept = [*pinned, *(item for unit in units[middle:] for item in unit)]
        found = await tried(kept)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle - 1
    return best


def _split(items: Sequence[Item]) -> tuple[list[Item], list[Unit]]:
    """Returns the messages of the system or developer that come first, and the units of the rest."""
    start = 0
    while start < len(items) and items[start].get("role") in ("system", "developer"):
        start += 1
    return list(items[:start]), units_of(items[start:])


def units_of(items: Sequence[Item]) -> list[Unit]:
    """Returns the items in groups that belong together: calls with their results, reasoning with what it led to."""
    answered = {item["call_id"]: index for index, item in enumerate(items) if item["type"] in OUTPUTS}
    units: list[Unit] = []
    end = 0  # of the open unit
    for index, item in enumerate(items):
        if index >= end:
            units.append([])
            end = index + 1
        units[-1].append(item)
        if item["type"] == "reasoning":
            end = max(end, index + 2)
        elif item["type"] in ("function_call", "custom_tool_call"):
            end = max(end, answered.get(item["call_id"], index) + 1)
    return units
