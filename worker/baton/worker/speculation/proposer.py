"""The interfaces of proposers, which guess the next tokens of requests. A wrong guess costs time, never a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from baton.worker.core import Int32, RowInit


class Ask(NamedTuple):
    """A row whose next tokens are to be guessed."""

    row: int
    token_ids: Int32  # all known ones, prompt first; the proposer does not change them
    most: int  # tokens that are wanted


class Proposer(Protocol):
    """Guesses the next tokens of the batch's rows."""

    costly: bool  # guesses take the device's time, so that no more are wanted than are verified

    def admit(self, init: RowInit) -> None:
        """Begins a row, whose tokens so far are known."""

    def free(self, row: int, token_ids: Int32) -> None:
        """Ends a row. `token_ids` are its output's, as far as they are known."""

    def propose(self, asked: Sequence[Ask]) -> list[Int32 | Exception]:
        """Returns up to `most` tokens that may follow those of each row, or what went wrong with it."""

    def sleep(self) -> int:
        """Frees memory whose contents can be made again. Returns its bytes."""

    def close(self) -> None:
        """Ends threads."""


class RowProposer(Protocol):
    """Guesses the next tokens of one row after the other."""

    def admit(self, init: RowInit) -> None:
        """Begins a row, whose tokens so far are known."""

    def free(self, row: int, token_ids: Int32) -> None:
        """Ends a row. `token_ids` are its output's, as far as they are known."""

    def propose(self, row: int, token_ids: Int32, most: int) -> Int32:
        """Returns up to `most` tokens that may follow all of the row's `token_ids`, which it does not change."""


class EachRow:
    """Implements Proposer by one that knows one row at a time, and takes none of the device's time."""

    costly = False

    def __init__(self, proposer: RowProposer) -> None:
        self._proposer = proposer

    def admit(self, init: RowInit) -> None:
        self._proposer.admit(init)

    def free(self, row: int, token_ids: Int32) -> None:
        self._proposer.free(row, token_ids)

    def propose(self, asked: Sequence[Ask]) -> list[Int32 | Exception]:
        return [self._propose(ask) for ask in asked]

    def sleep(self) -> int:
        """Returns 0: there is no such memory."""
        return 0

    def close(self) -> None:
        """Does nothing."""

    def _propose(self, ask: Ask) -> Int32 | Exception:
        try:
            return self._proposer.propose(*ask)
        except Exception as error:
            return error
