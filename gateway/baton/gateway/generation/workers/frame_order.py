"""In which order a worker's frame is handed to its requests, and how much of it at once. Knows no request.

A frame that the worker merged, because the gateway lags, holds as much as was made meanwhile. Whoever gets least is
served first, so that a newcomer's first token waits for nobody's backlog; and the frame is handed over in turns,
between which connections are accepted, requests read and placed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from baton.v1 import types_pb2

# What one turn hands over, in pieces and in tokens: two or three milliseconds.
TURN_PIECES = 256
TURN_TOKENS = 2048

Logprobs = Sequence[types_pb2.TokenLogprobs]
Piece = tuple[int, Sequence[int], Logprobs | None]  # of one slot


def merged_pieces(
    slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int], logprobs: Iterable[tuple[int, Logprobs]]
) -> list[Piece]:
    """One piece a slot, of all its steps in their order; those with the fewest tokens first.

    `counts` are the tokens of each of `slots`; empty: one of each.
    """
    tokens: dict[int, list[int]] = {slot: [] for slot in slots}
    if counts:
        begin = 0
        for slot, count in zip(slots, counts, strict=True):
            tokens[slot] += token_ids[begin : begin + count]
            begin += count
    else:
        for slot, token_id in zip(slots, token_ids, strict=True):
            tokens[slot].append(token_id)
    entries: dict[int, list[types_pb2.TokenLogprobs]] = {}
    for slot, of_slot in logprobs:
        entries.setdefault(slot, []).extend(of_slot)
    return sorted([(slot, mine, entries.get(slot)) for slot, mine in tokens.items()], key=_num_tokens)


def turns(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """The pieces in their order, as much at once as one turn takes; a piece is never cut."""
    begin = num_tokens = 0
    for at, piece in enumerate(pieces):
        if at - begin >= TURN_PIECES or num_tokens >= TURN_TOKENS:
            yield pieces[begin:at]
            begin, num_tokens = at, 0
        num_tokens += len(piece[1])
    if begin < len(pieces):
        yield pieces[begin:]


def _num_tokens(piece: Piece) -> int:
    return len(piece[1])
