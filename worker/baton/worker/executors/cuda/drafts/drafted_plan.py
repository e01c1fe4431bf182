"""A step's decodes with their drafts, each token a sequence of its own. Knows no device and no proposer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from baton.worker.core import Int32, Int64, MaskGuide, StepPlan, StepResult, TokenMasks

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
    walked: Mapping[int, Sequence[Int32]] = field(default_factory=dict)  # by row: its masks behind each draft

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        num_tokens: Int64,
        drafts: Sequence[Int32],
        walked: Mapping[int, Sequence[Int32]] = MappingProxyType({}),
    ) -> DraftedPlan:
        """Returns a plan of decodes with the drafts of each. `num_tokens`: the known tokens of its rows.

        `walked`: of the plan's rows under a mask, by index, one mask behind each draft.
        """
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
        return cls(computed, inputs, starts, widths, walked)

    def masks(self, masks: TokenMasks | None) -> TokenMasks | None:
        """Returns the masks of all sequences of some rows, given those of the rows' first ones."""
        if masks is None:
            return None
        indices, bits = [], []
        for row, first in zip(masks.indices.tolist(), masks.bits, strict=True):
            each = [first, *self.walked.get(row, ())]
            assert len(each) == self.widths[row], f"row {row} has {len(each)} masks for {self.widths[row]} tokens"
            indices.append(self.starts[row] + np.arange(len(each)))
            bits += each
        return TokenMasks(np.concatenate(indices).astype(np.int32), np.stack(bits))

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


def within_masks(masks: TokenMasks | None, drafts: Sequence[Int32]) -> tuple[list[Int32], dict[int, Sequence[Int32]]]:
    """Cuts the drafts of rows under a mask where it ends them. Returns all drafts, and the masks behind those."""
    kept, walked = list(drafts), dict[int, Sequence[Int32]]()
    if masks is None:
        return kept, walked
    guides = masks.guides or (None,) * len(masks.indices)
    for row, first, guide in zip(masks.indices.tolist(), masks.bits, guides, strict=True):
        found = [] if guide is None else _walked(guide, first, kept[row])
        kept[row] = kept[row][: len(found)]
        if found:
            walked[row] = found
    return kept, walked


def _walked(guide: MaskGuide, mask: Int32, drafts: Int32) -> list[Int32]:
    """Returns the masks behind a row's drafts, as far as each is allowed."""
    walk, found = guide.walk(), list[Int32]()
    for token_id in drafts.tolist():
        behind = walk.follow(token_id) if mask[token_id // 32] >> (token_id % 32) & 1 else None
        if behind is None:
            break
        found.append(behind)
        mask = behind
    return found
