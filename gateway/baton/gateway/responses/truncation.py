"""Truncates a conversation that is too long: keeps the instructions and as many of the latest items as fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

from baton.gateway.models.prompts.rendering import size_of
from baton.gateway.responses.items import OUTPUTS, Item

Unit = list[Item]

_ITEM_CHARS = 32  # counted per item besides its text, for what the template adds
_FIRST_CHARS = 2  # characters per token in the first attempt; an attempt that fits gives the actual ratio
_MAX_TRIES = 12
_CAUTION = 0.99  # an estimate slightly too long gives less information than one that fits
_NEAR = 1.15  # multiple of the room up to which the whole conversation is tried
_HALVED_UNITS = 64  # with fewer units, a binary search is used
_MAX_TRIED_ITEMS = 10_000  # sum over all attempts; half a second of work
MANY_ITEMS = 4000  # longer conversations are tried as a whole only if shorter attempts show that they may fit


class Fit(Protocol):
    """An attempt that fits."""

    @property
    def num_tokens(self) -> int:
        """Returns the length of the prompt in tokens."""


F = TypeVar("F", bound=Fit)


@dataclass(frozen=True, slots=True)
class Parted:
    """A conversation split into units, the oldest of which may be dropped."""

    pinned: Sequence[Item]  # leading messages of the system or developer
    items: Sequence[Item]  # the other items
    starts: Sequence[int]  # start indices of the units in `items`
    sizes: Sequence[int]  # characters from each unit's start to the end

    def kept(self, first: int) -> list[Item]:
        """Returns the items that remain if the units from `first` on are kept."""
        return [*self.pinned, *self.items[self.starts[first] :]]

    def first_of_size(self, num_chars: float) -> int:
        """Returns the first unit from which at most `num_chars` characters follow."""
        return bisect_left(self.sizes, -num_chars, key=lambda size: -size)


def parted(items: Sequence[Item]) -> Parted:
    """Splits the items into units."""
    start = 0
    while start < len(items) and items[start].get("role") in ("system", "developer"):
        start += 1
    units = units_of(items[start:])
    starts = list(accumulate((len(unit) for unit in units[:-1]), initial=0))
    sizes = [size_of(unit) + _ITEM_CHARS * len(unit) for unit in units]
    return Parted(items[:start], items[start:], starts, list(accumulate(reversed(sizes)))[::-1])


async def longest_that_fits(
    conversation: Parted, budget: int, tried: Callable[[list[Item]], Awaitable[F | None]], fewest: int = 1
) -> F | None:
    """Drops the fewest oldest units for which `tried` returns a value. Returns that value, or None.

    Instructions and the last unit are always kept. `budget` is the number of tokens that fit and guides the search. At
    least `fewest` units are dropped. For conversations of very many items, more than the fewest may be dropped.
    """
    low, high = fewest, len(conversation.starts) - 1
    best: F | None = None
    search = _Search(conversation, budget, may_be_whole=fewest == 0)
    num_tries = num_items = 0
    while low <= high:
        if best is not None and (num_tries >= _MAX_TRIES or num_items >= _MAX_TRIED_ITEMS):
            break
        first = min(max(search.guess(low, high), low), high)
        kept = conversation.kept(first)
        num_tries, num_items = num_tries + 1, num_items + len(kept)
        found = await tried(kept)
        if found is None:
            low = first + 1
            search.too_long(first)
        else:
            best, high = found, first - 1
            search.fits(first, found.num_tokens)
    return best


class _Search:
    """Estimates the first unit from the tokens of earlier attempts, then moves on in growing steps."""

    def __init__(self, conversation: Parted, budget: int, *, may_be_whole: bool) -> None:
        self._conversation = conversation
        self._may_be_whole = may_be_whole
        self._budget = budget
        self._first = conversation.first_of_size(_FIRST_CHARS * budget)
        self._step = 1
        self._has_fitted = False

    def guess(self, low: int, high: int) -> int:
        """Returns the unit to try: the middle if there are few units, or if a step would be longer."""
        width = high - low
        is_near = width <= _HALVED_UNITS or self._step > width
        return (low + high) // 2 if is_near else self._first

    def too_long(self, first: int) -> None:
        """Chooses the next attempt after one that did not fit."""
        if self._has_fitted:
            self._first, self._step = first + self._step, 2 * self._step
        else:
            self._first = max(first + 1, self._conversation.first_of_size(self._conversation.sizes[first] / 4))

    def fits(self, first: int, num_tokens: int) -> None:
        """Chooses the next attempt after one that fit."""
        self._has_fitted = True
        sizes = self._conversation.sizes
        size = sizes[first] * self._budget / max(1, num_tokens)
        if self._may_be_whole and sizes[0] <= _NEAR * size:
            self._may_be_whole, self._first = False, 0
            return
        guessed = self._conversation.first_of_size(_CAUTION * size)
        if guessed < first - self._step:
            self._first, self._step = guessed, max(1, (first - guessed) // 64)
        else:
            self._first, self._step = first - self._step, 2 * self._step


def units_of(items: Sequence[Item]) -> list[Unit]:
    """Groups items that belong together: calls with their results, reasoning with what follows."""
    answered = {item["call_id"]: index for index, item in enumerate(items) if item["type"] in OUTPUTS}
    units: list[Unit] = []
    end = 0  # end of the open unit
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
