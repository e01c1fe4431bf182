"""Drafts of the batch's rows: asks the proposer, within the lengths that pay. An error of a proposer costs its row."""

from __future__ import annotations

import logging

import numpy as np

from baton.worker.core import Int32, Int64, RowInit
from baton.worker.speculation.lengths import DraftLengths
from baton.worker.speculation.proposer import Ask, Proposer

_log = logging.getLogger(__name__)
_NOTHING = np.empty(0, np.int32)


class Speculator:
    """One executor's drafts. `vocab_size` bounds the proposer's tokens."""

    def __init__(
        self, proposer: Proposer, name: str, num_rows: int, vocab_size: int, lengths: DraftLengths | None = None
    ) -> None:
        self.lengths = lengths or DraftLengths(num_rows)
        self.num_failed = 0  # requests whose proposer failed
        self._proposer = proposer
        self._name = name  # in the log
        self._vocab_size = vocab_size
        self._dropped = np.zeros(num_rows, np.bool_)  # rows that get no drafts any more

    def admit(self, init: RowInit) -> None:
        """Begins a row."""
        self._dropped[init.row] = False
        self.lengths.admit(init.row)
        try:
            self._proposer.admit(init)
        except Exception as error:
            self._drop(init.row, error)

    def free(self, row: int, token_ids: Int32) -> None:
        """Ends a row with this output."""
        try:
            self._proposer.free(row, token_ids)
        except Exception as error:
            self._drop(row, error)

    def drafts(self, rows: Int64, token_ids: Int32, num_tokens: Int64, most: Int64) -> list[Int32]:
        """Returns each row's drafts, at most `most` of each. `rows` are all that decode in the step.

        token_ids is [all rows, columns], num_tokens [all rows].
        """
        usable = np.where(self._dropped[rows], 0, most)
        if self._proposer.costly:
            wanted = self.lengths.choose(rows, usable)
        else:
            wanted = np.where(self.lengths.worth(rows), usable, 0)
        found = [_NOTHING] * len(rows)
        indices = np.flatnonzero(wanted > 0).tolist()
        asked = [
            Ask(int(rows[index]), token_ids[rows[index], : num_tokens[rows[index]]], int(wanted[index]))
            for index in indices
        ]
        for index, guess in zip(indices, self._guesses(asked), strict=True):
            found[index] = guess
        if self._proposer.costly or not indices:
            return found
        available = np.array([len(each) for each in found], np.int64)
        lengths = self.lengths.choose(rows, available)
        return [each[:length] for each, length in zip(found, lengths.tolist(), strict=True)]

    def sleep(self) -> int:
        """Frees the proposer's memory that can be made again. Returns its bytes."""
        return self._proposer.sleep()

    def close(self) -> None:
        """Ends the proposer's threads."""
        self._proposer.close()

    def _guesses(self, asked: list[Ask]) -> list[Int32]:
        if not asked:
            return []
        try:
            answers = self._proposer.propose(asked)
        except Exception as error:
            answers = [error] * len(asked)
        return [self._checked(ask, answer) for ask, answer in zip(asked, answers, strict=True)]

    def _checked(self, ask: Ask, answer: Int32 | Exception) -> Int32:
        """Returns an answer's tokens up to the first one that the model does not have."""
        if isinstance(answer, Exception):
            self._drop(ask.row, answer)
            return _NOTHING
        try:
            found = np.asarray(answer, np.int64).reshape(-1)[: ask.most]
        except (TypeError, ValueError, OverflowError) as error:
            self._drop(ask.row, error)
            return _NOTHING
        wrong = np.flatnonzero((found < 0) | (found >= self._vocab_size))
        return (found[: int(wrong[0])] if len(wrong) else found).astype(np.int32)

    def _drop(self, row: int, error: Exception) -> None:
        _log.error("the proposer %s failed; row %d goes on without it", self._name, row, exc_info=error)
        self.num_failed += not self._dropped[row]
        self._dropped[row] = True
