"""Which items of a conversation that is too long are kept: the instructions, and as many of the latest as fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

from baton.gateway.models.prompts.rendering import size_of
from baton.gateway.responses.items import OUTPUTS, Item

Unit = list[Item]

_ITEM_CHARS = 32  # that an item counts beside its text: what the template writes around it
_FIRST_CHARS = 2  # a token; a first try that fits teaches how many it really has
_MAX_TRIES = 12
_CAUTION = 0.99  # a guess that is a little too long teaches less than one that fits
_NEAR = 1.15  # of the room: a whole conversation that would have so many tokens is tried
_HALVED_UNITS = 64  # among fewer no guess is made
_MAX_TRIED_ITEMS = 10_000  # of all tries together: half a second's work
MANY_ITEMS = 4000  # of more the whole conversation is tried only where shorter ones say that it may fit


class Fit(Protocol):
    """A try that fits."""

    @property
    def num_tokens(self) -> int:
        """Returns the length of the prompt in tokens."""


F = TypeVar("F", bound=Fit)


@dataclass(frozen=True, slots=True)
class Parted:
    """A conversation in units, of which the oldest may go."""

    pinned: Sequence[Item]  # messages of the system or developer that come first
    items: Sequence[Item]  # the others
    starts: Sequence[int]  # of the units among them
    sizes: Sequence[int]  # characters from a unit's start to the end

    def kept(self, first: int) -> list[Item]:
        """Returns what is left where units from `first` on are kept."""
        return [*self.pinned, *self.items[self.starts[first] :]]

    def first_of_size(self, num_chars: float) -> int:
        """Returns the first unit from which on there are at most so many characters."""
        return bisect_left(self.sizes, -num_chars, key=lambda size: -size)


def parted(items: Sequence[Item]) -> Parted:
    """Returns the items in units."""
    start = 0
    while start < len(items) and items[start].get("role") in ("system", "developer"):
        start += 1
    units = units_of(items[start:])
    starts = list(accumulate((len(unit) for unit in units[:-1]), initial=0))
    sizes = [size_of(unit) + _ITEM_CHARS * len(unit) for unit in units]
    return Parted(items[:start], items[start:], starts, list(accumulate(reversed(sizes)))[::-1])


async def longest_that_fits(
    conversation: Parted, room: int, tried: Callable[[list[Item]], Awaitable[F | None]], fewest: int = 1
) -> F | None:
    """Drops the fewest of the oldest units for which `tried` returns a value, and returns that; None: none does.

    What instructs the model stays, and the last unit does. `room` is how many tokens fit, by which the search guesses;
    `fewest` are the units that are known to be too many. Of a conversation of very many items more than the fewest may
    go.
    """
    low, high = fewest, len(conversation.starts) - 1
    best: F | None = None
    search = _Search(conversation, room, may_be_whole=fewest == 0)
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
    """Guesses the first unit by how many tokens fitted so far, and steps from there, further with every step."""

    def __init__(self, conversation: Parted, room: int, *, may_be_whole: bool) -> None:
        self._conversation = conversation
        self._may_be_whole = may_be_whole
        self._room = room
        self._first = conversation.first_of_size(_FIRST_CHARS * room)
        self._step = 1
        self._has_fitted = False

    def guess(self, low: int, high: int) -> int:
        """Returns the unit to try: the middle where there are few, or where steps would be longer."""
        width = high - low
        is_near = width <= _HALVED_UNITS or self._step > width
        return (low + high) // 2 if is_near else self._first

    def too_long(self, first: int) -> None:
        """Chooses the next try after a prompt that is longer than the context."""
        if self._has_fitted:
            self._first, self._step = first + self._step, 2 * self._step
        else:
            self._first = max(first + 1, self._conversation.first_of_size(self._conversation.sizes[first] / 4))

    def fits(self, first: int, num_tokens: int) -> None:
        """Chooses the next try after a prompt that fits the context."""
        self._has_fitted = True
        sizes = self._conversation.sizes
        size = sizes[first] * self._room / max(1, num_tokens)
        if self._may_be_whole and sizes[0] <= _NEAR * size:
            self._may_be_whole, self._first = False, 0
            return
        guessed = self._conversation.first_of_size(_CAUTION * size)
        if guessed < first - self._step:
            self._first, self._step = guessed, max(1, (first - guessed) // 64)
        else:
            self._first, self._step = first - self._step, 2 * self._step


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
