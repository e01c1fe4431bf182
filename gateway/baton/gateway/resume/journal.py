"""What another gateway needs to go on with a stream: the request as it came, its seed, and the tokens so far."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from baton.gateway.resume.position import ChoicePosition, Cursor
from baton.rpc.errors import InvalidRequest

_ENTRY = struct.Struct("<II")  # choice, number of tokens; the tokens follow, 4 bytes each


@dataclass(frozen=True, slots=True)
class StreamHead:
    """What of a stream never changes."""

    tenant: str
    request_id: str
    path: str  # of the REST route; the method's name under gRPC
    body: bytes  # the request
    num_choices: int
    seed: int
    created: int  # Unix seconds


@dataclass(slots=True, eq=False)
class Journal:
    """One stream's, while this gateway runs it. `on_news` is told when there is something to write down."""

    head: StreamHead
    cursor: Cursor
    positions: tuple[ChoicePosition, ...]
    known: tuple[tuple[int, ...], ...]  # of each choice: tokens that were written down before
    on_news: Callable[[Journal], None]
    field_name: str = ""  # of the position in the client's request
    unwritten: list[bytes] = field(default_factory=list)
    ended: bool = False
    _everything: bytearray = field(default_factory=bytearray)  # written down or not
    _counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._counts = [0] * self.head.num_choices
        for index, token_ids in enumerate(self.known):
            if token_ids:
                self._everything += entry_of(index, token_ids)

    def check_length(self, max_tokens: int) -> None:
        """Raises InvalidRequest for a position beyond the longest output."""
        most = max(position.num_tokens for position in self.positions)
        if most > max_tokens:
            raise InvalidRequest(
                f"{self.field_name} says that {most} tokens came, and the stream has {max_tokens} at most",
                field=self.field_name,
            )

    def replayed(self, index: int) -> tuple[int, ...]:
        """The tokens that the client has, as far as they were written down."""
        return self.known[index][: self.positions[index].num_tokens]

    def split(self, index: int, so_far: int, num_new: int) -> int:
        """How many of a choice's next tokens the client has."""
        return max(0, min(num_new, self.positions[index].num_tokens - so_far))

    def append(self, index: int, token_ids: Sequence[int]) -> None:
        """The choice's next tokens; those that were written down before are not written again."""
        before, self._counts[index] = self._counts[index], self._counts[index] + len(token_ids)
        fresh = token_ids[max(0, len(self.known[index]) - before) :]
        if fresh:
            entry = entry_of(index, fresh)
            self.unwritten.append(entry)
            self._everything += entry
            self.on_news(self)

    def begin_anew(self) -> None:
        """What was written down is lost, or may be there twice: all of it is to be written again."""
        self.unwritten = [bytes(self._everything)] if self._everything else []

    def end(self) -> None:
        """Nothing follows."""
        self.ended = True
        self.on_news(self)


def entry_of(index: int, token_ids: Sequence[int]) -> bytes:
    """Tokens of one choice as they are written down."""
    return _ENTRY.pack(index, len(token_ids)) + struct.pack(f"<{len(token_ids)}I", *token_ids)


def tokens_of(entries: Iterable[bytes], num_choices: int) -> tuple[tuple[int, ...], ...]:
    """What was written down, by choice."""
    tokens: list[list[int]] = [[] for _ in range(num_choices)]
    for data in entries:
        start = 0
        while start < len(data):
            index, count = _ENTRY.unpack_from(data, start)
            start += _ENTRY.size
            tokens[index].extend(struct.unpack_from(f"<{count}I", data, start))
            start += 4 * count
    return tuple(map(tuple, tokens))


def check_positions(head: StreamHead, positions: Sequence[ChoicePosition], field: str) -> None:
    """Raises InvalidRequest for a position that cannot be of this stream."""
    if len(positions) != head.num_choices:
        raise InvalidRequest(
            f"{field} is of {len(positions)} choices, and the stream has {head.num_choices}; give the id as it came",
            field=field,
        )
