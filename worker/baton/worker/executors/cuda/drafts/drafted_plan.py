"""A step's decodes with their drafts, each token a sequence of its own. Knows no device and no proposer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.worker.core import Int32, Int64, StepPlan, StepResult, TokenMasks

_NO_DRAFT = -1


@dataclass(frozen=True, slots=True)
class DraftedPlan:
    """What a device computes of a plan of decodes: a sequence for each row's last token, and one for each draft.

    A draft is the input of its sequence, behind the tokens of the sequences before it.
    """

    plan: StepPlan  # of all sequences
    drafts: Int32  # the input of each sequence that follows another of its row; -1: the row's last token
    starts: Int64  # each row's first sequence
    widths: Int64  # sequences of each row

    @classmethod
    def of(cls, plan: StepPlan, num_tokens: Int64, drafts: Sequence[Int32]) -> DraftedPlan:
        """Returns a plan of decodes with the drafts of each. `num_tokens`: the known tokens of its rows."""
        widths = np.array([1 + len(each) for each in drafts], np.int64)
        starts = np.cumsum(widths) - widths
        index = np.repeat(np.arange(len(widths)), widths)
        offsets = np.arange(len(index)) - starts[index]
        inputs = np.full(len(index), _NO_DRAFT, np.int32)
        inputs[offsets > 0] = np.concatenate(drafts)
        computed = dataclasses.replace(
            plan,
            rows=plan.rows[index],
            num_scheduled_tokens=np.ones(len(index), np.int32),
            num_computed_tokens=(num_tokens[index] - 1 + offsets).astype(np.int32),
            samples=np.ones(len(index), np.bool_),
            num_decodes=len(index),
        )
        return cls(computed, inputs, starts, widths)

    def masks(self, masks: TokenMasks | None) -> TokenMasks | None:
        """Returns masks of rows as masks of their first sequences. A row with a mask has no drafts."""
        if masks is None:
            return None
        return dataclasses.replace(masks, indices=self.starts[masks.indices].astype(np.int32))

    def accepted(self, result: StepResult) -> StepResult:
        """Returns the result of the rows: the token behind the last known one, and those behind right drafts."""
        drawn = result.counts > 0
        places = np.cumsum(drawn) - 1
        token_ids = np.full(len(drawn), _NO_DRAFT, np.int32)
        token_ids[drawn] = result.token_ids
        follows = np.append(self.drafts[1:], np.int32(_NO_DRAFT))
        ends = np.flatnonzero((token_ids != follows) | (follows == _NO_DRAFT))
        last = ends[np.searchsorted(ends, self.starts)]  # of each row's sequences whose tokens are its own
        index = np.arange(len(drawn))
        kept = drawn & (index <= np.repeat(last, self.widths))
        renumbered = {int(places[old]): new for new, old in enumerate(np.flatnonzero(kept).tolist())}
        rows = np.repeat(np.arange(len(self.widths)), self.widths)
        return StepResult(
            result.step,
            token_ids[kept],
            np.add.reduceat(kept.astype(np.int32), self.starts),
            {renumbered[old]: entry for old, entry in result.logprobs.items() if old in renumbered},
            failed={int(rows[sequence]): error for sequence, error in result.failed.items()},
            drafted=(self.widths - 1).astype(np.int32),
            seconds=result.seconds,
            idle_seconds=result.idle_seconds,
        )
