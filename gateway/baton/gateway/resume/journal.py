"""What another gateway needs to continue a stream: the original request, its seed and the tokens so far."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from baton.gateway.resume.position import ChoicePosition, Cursor
from baton.rpc.errors import InvalidRequest

_ENTRY = struct.Struct("<II")  # choice and number of tokens, followed by 4 bytes per token


@dataclass(frozen=True, slots=True)
class StreamHead:
    """The immutable part of a stream's record."""

    tenant: str
    request_id: str
    path: str  # of the REST route, or the method's full name in gRPC
    body: bytes  # the serialized request
    num_choices: int
    seed: int
    created: int  # Unix seconds


@dataclass(slots=True, eq=False)
class Journal:
    """The record of one stream while this gateway runs it. `on_change` is called when there is something to write."""

    head: StreamHead
    cursor: Cursor
    positions: tuple[ChoicePosition, ...]
    known: tuple[tuple[int, ...], ...]  # tokens already stored, by choice
    on_change: Callable[[Journal], None]
    field_name: str = ""  # the client's field with the position
    unwritten: list[bytes] = field(default_factory=list)
    ended: bool = False
    _everything: bytearray = field(default_factory=bytearray)  # all entries, stored or not
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
                f"{self.field_name} is at {most} tokens; the stream has at most {max_tokens}",
                field=self.field_name,
            )

    def replayed(self, index: int) -> tuple[int, ...]:
        """Returns the stored tokens up to the client's position."""
        return self.known[index][: self.positions[index].num_tokens]

    def split(self, index: int, so_far: int, num_new: int) -> int:
        """Returns how many of a choice's next tokens the client already has."""
        return max(0, min(num_new, self.positions[index].num_tokens - so_far))

    def append(self, index: int, token_ids: Sequence[int]) -> None:
        """Appends the choice's next tokens; stored ones are not written again."""
        before, self._counts[index] = self._counts[index], self._counts[index] + len(token_ids)
        fresh = token_ids[max(0, len(self.known[index]) - before) :]
        if fresh:
            entry = entry_of(index, fresh)
            self.unwritten.append(entry)
            self._everything += entry
            self.on_change(self)

    def begin_anew(self) -> None:
        """Marks all entries to be written again, after Redis lost them or may hold them twice."""
        self.unwritten = [bytes(self._everything)] if self._everything else []

    def end(self) -> None:
        """Marks the stream as ended."""
        self.ended = True
        self.on_change(self)


def entry_of(index: int, token_ids: Sequence[int]) -> bytes:
    """Encodes tokens of one choice as a log entry."""
    return _ENTRY.pack(index, len(token_ids)) + struct.pack(f"<{len(token_ids)}I", *token_ids)


def tokens_of(entries: Iterable[bytes], num_choices: int) -> tuple[tuple[int, ...], ...]:
    """Decodes log entries into tokens by choice."""
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
    """Raises InvalidRequest for positions that do not fit this stream."""
    if len(positions) != head.num_choices:
        raise InvalidRequest(
            f"{field} has {len(positions)} choices, the stream has {head.num_choices}; give the id as received",
            field=field,
        )
