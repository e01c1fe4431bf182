"""The interface of proposers, which guess the next tokens of requests. A wrong guess costs time, never a token."""

from __future__ import annotations

from typing import Protocol

from baton.worker.core import Int32, RowInit


class Proposer(Protocol):
    """Guesses the next tokens of the batch's rows."""

    def admit(self, init: RowInit) -> None:
        """Begins a row, whose tokens so far are known."""

    def free(self, row: int, token_ids: Int32) -> None:
        """Ends a row. `token_ids` are its output's, as far as they are known."""

    def propose(self, row: int, token_ids: Int32, most: int) -> Int32:
        """Returns up to `most` tokens that may follow all of the row's `token_ids`, which it does not change."""
