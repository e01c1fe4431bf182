"""Tokens that wait for more of their request, so that they are sent together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.worker.core import TokenLogprobs

Columns = tuple[list[int], list[int], dict[int, TokenLogprobs]]  # slots, tokens, log-probabilities by row


@dataclass(slots=True)
class _Piece:
    interval: int
    begun: bool = False  # the first token is sent at once
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by place in token_ids


class HeldTokens:
    """The held tokens of one stream, by slot. False if no slot wants its tokens together."""

    def __init__(self) -> None:
        self._pieces: dict[int, _Piece] = {}

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def expect(self, slot: int, interval: int) -> None:
        """Holds a slot's tokens, after its first one, until there are `interval`."""
        self._pieces[slot] = _Piece(interval)

    def add(self, slots: list[int], token_ids: list[int], logprobs: Mapping[int, TokenLogprobs]) -> Columns:
        """Takes new tokens. Returns those to send now, each slot's in their order."""
        due: Columns = [], [], {}
        for row, (slot, token_id) in enumerate(zip(slots, token_ids, strict=True)):
            piece = self._pieces.get(slot)
            if piece is not None:
                if row in logprobs:
                    piece.logprobs[len(piece.token_ids)] = logprobs[row]
                piece.token_ids.append(token_id)
                if not piece.begun or len(piece.token_ids) >= piece.interval:
                    piece.begun = True
                    _move(slot, piece, due)
            else:
                if row in logprobs:
                    due[2][len(due[0])] = logprobs[row]
                due[0].append(slot)
                due[1].append(token_id)
        return due

    def take(self, slot: int) -> Columns:
        """Returns what is held of a slot."""
        taken: Columns = [], [], {}
        if piece := self._pieces.get(slot):
            _move(slot, piece, taken)
        return taken

    def forget(self, slot: int) -> None:
        """Forgets a slot and its tokens. Idempotent."""
        self._pieces.pop(slot, None)


def _move(slot: int, piece: _Piece, target: Columns) -> None:
    slots, token_ids, logprobs = target
    for place, entry in piece.logprobs.items():
        logprobs[len(slots) + place] = entry
    slots.extend([slot] * len(piece.token_ids))
    token_ids.extend(piece.token_ids)
    piece.token_ids.clear()
    piece.logprobs.clear()
