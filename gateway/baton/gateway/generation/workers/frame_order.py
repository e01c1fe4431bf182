"""Orders a worker's frame for delivery and splits it into batches. Knows nothing of requests.

A frame that the worker merged because the gateway lags holds many steps. Slots with the fewest tokens come first, so
that a new request's first token does not wait for the backlog of others. Between batches the event loop accepts
connections and reads and places requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from baton.v1 import types_pb2

# Size of one batch, in pieces, tokens and time. Parsers of calls and reasoning take twenty times what plain text does.
BATCH_PIECES = 256
BATCH_TOKENS = 2048
BATCH_SECONDS = 0.002

Logprobs = Sequence[types_pb2.TokenLogprobs]
Piece = tuple[int, Sequence[int], Logprobs | None]  # slot, token ids, log-probabilities


def merged_pieces(
    slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int], logprobs: Iterable[tuple[int, Logprobs]]
) -> list[Piece]:
    """Returns one piece per slot with all its steps in order, fewest tokens first.

    `counts` are the tokens of each entry of `slots`; if empty, each has one.
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
    return sorted([(slot, own_tokens, entries.get(slot)) for slot, own_tokens in tokens.items()], key=_num_tokens)


def batches(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """Yields the pieces in order, in batches; a piece is never split."""
    begin = num_tokens = 0
    for at, piece in enumerate(pieces):
        if at - begin >= BATCH_PIECES or num_tokens >= BATCH_TOKENS:
            yield pieces[begin:at]
            begin, num_tokens = at, 0
        num_tokens += len(piece[1])
    if begin < len(pieces):
        yield pieces[begin:]


def _num_tokens(piece: Piece) -> int:
    return len(piece[1])
