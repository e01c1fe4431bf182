"""Drafts of the batch's rows: asks the proposer, within the lengths that pay. An error of a proposer costs its row."""

from __future__ import annotations

import logging

import numpy as np

from baton.worker.core import Int32, Int64, RowInit
from baton.worker.speculation.lengths import DraftLengths
from baton.worker.speculation.ngram import NgramProposer
from baton.worker.speculation.proposer import Proposer
from baton.worker.speculation.suffix import SuffixProposer
from baton.worker.speculation_settings import SpeculationSettings

_log = logging.getLogger(__name__)
_NOTHING = np.empty(0, np.int32)


class Speculator:
    """One executor's drafts. `vocab_size` bounds the proposer's tokens."""

    def __init__(self, proposer: Proposer, num_rows: int, vocab_size: int, lengths: DraftLengths | None = None) -> None:
        self.lengths = lengths or DraftLengths(num_rows)
        self.num_failed = 0  # rows whose proposer failed
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._dropped = np.zeros(num_rows, np.bool_)  # rows that get no drafts any more

    def admit(self, init: RowInit) -> None:
        """Begins a row."""
        self._dropped[init.row] = False
        self.lengths.admit(init.row)
        try:
            self._proposer.admit(init)
        except Exception:
            self._drop(init.row)

    def free(self, row: int, token_ids: Int32) -> None:
        """Ends a row with this output."""
        try:
            self._proposer.free(row, token_ids)
        except Exception:
            self._drop(row)

    def drafts(self, rows: Int64, token_ids: Int32, num_tokens: Int64, most: Int64) -> list[Int32]:
        """Returns each row's drafts, at most `most` of each. `rows` are all that decode in the step.

        token_ids is [all rows, columns], num_tokens [all rows].
        """
        wanted = (most > 0) & ~self._dropped[rows] & self.lengths.worth(rows)
        found = [_NOTHING] * len(rows)
        for index in np.flatnonzero(wanted).tolist():
            row = int(rows[index])
            found[index] = self._propose(row, token_ids[row, : num_tokens[row]], int(most[index]))
        available = np.array([len(each) for each in found], np.int64)
        lengths = self.lengths.choose(rows, available)
        return [each[:length] for each, length in zip(found, lengths.tolist(), strict=True)]

    def _propose(self, row: int, token_ids: Int32, most: int) -> Int32:
        try:
            found = np.asarray(self._proposer.propose(row, token_ids, most), np.int32)[:most]
        except Exception:
            self._drop(row)
            return _NOTHING
        wrong = np.flatnonzero((found < 0) | (found >= self._vocab_size))
        return found[: int(wrong[0])] if len(wrong) else found

    def _drop(self, row: int) -> None:
        _log.exception("the proposer %s failed; row %d goes on without it", type(self._proposer).__name__, row)
        self.num_failed += 1
        self._dropped[row] = True


def make_proposer(settings: SpeculationSettings) -> Proposer:
    """Returns the proposer of a method."""
    if settings.method == "suffix":
        depth, size = settings.suffix_decoding_max_tree_depth, settings.suffix_decoding_max_cached_tokens
        return SuffixProposer(depth, size, settings.prompt_lookup_min)
    return NgramProposer(settings.prompt_lookup_max, settings.prompt_lookup_min)
