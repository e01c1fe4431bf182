"""The token masks of a step's constrained rows: given with the step, or drawn once it is launched."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from baton.worker.core import Int32, TokenMasks
from baton.worker.requests.state import NO_ROW, RequestState
from baton.worker.scheduling.follow_pace import FollowPace
from baton.worker.scheduling.steps.batch import Batch
from baton.worker.scheduling.steps.draft import ScheduledStep


class StepMasks:
    """Collects masks, and holds their rows until the grammars have the sampled tokens."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._pace = FollowPace()

    def add(self, scheduled: ScheduledStep) -> None:
        """Adds the masks to a new step, or sets its masks_follow."""
        if not self._batch.num_constrained:
            return
        plan = scheduled.plan
        constrained = self._batch.constrained[plan.rows] & plan.samples
        if not constrained.any():
            return
        rows = plan.rows[constrained]
        plan.masks_follow = self._batch.follows(rows)
        if not plan.masks_follow:
            plan.masks = _token_masks(scheduled, constrained)
        self._batch.hold(rows)
        self._batch.follow(rows, not plan.masks_follow and self._pace.may_follow())

    def draw(self, scheduled: ScheduledStep) -> tuple[TokenMasks | None, Int32]:
        """Returns the masks of a launched step whose masks_follow, and the indices of constrained rows without one.

        Those rows get no token: their grammars are not ready, or their requests have ended.
        """
        plan, batch = scheduled.plan, self._batch
        constrained = np.array([state.grammar is not None for state in scheduled.states]) & plan.samples
        ready = np.array([state.row != NO_ROW and not state.mask_pending for state in scheduled.states])
        late = [index for index in np.flatnonzero(constrained & ~ready) if scheduled.states[index].row != NO_ROW]
        # Of a prompt, the last token is computed again.
        unused = np.where(np.arange(len(plan.rows)) < plan.num_decodes, plan.num_scheduled_tokens, 1)
        batch.num_computed[plan.rows[late]] -= unused[late]
        drawn = constrained & ready
        batch.hold(plan.rows[drawn])
        self._pace.drawn(int(np.count_nonzero(drawn)) + len(late), len(late))
        batch.follow(plan.rows[drawn], self._pace.may_follow())
        masks = _token_masks(scheduled, drawn) if drawn.any() else None
        return masks, np.flatnonzero((constrained & ~ready)[plan.samples]).astype(np.int32)


def _token_masks(scheduled: ScheduledStep, constrained: NDArray[np.bool_]) -> TokenMasks:
    """Returns a copy of the masks of these rows. All of them sample, and their grammars are ready."""
    places = np.cumsum(scheduled.plan.samples, dtype=np.int32) - 1
    states = [scheduled.states[index] for index in np.flatnonzero(constrained).tolist()]
    bits = np.stack([_mask_of(state) for state in states])
    guides = tuple([state.grammar for state in states if state.grammar is not None])
    return TokenMasks(places[constrained].astype(np.int32), bits, guides)


def _mask_of(state: RequestState) -> NDArray[np.int32]:
    grammar = state.grammar
    assert grammar is not None, f"{state.request.request_id} has no constraint"
    assert grammar.ready, f"{state.request.request_id} is scheduled without its mask"
    return grammar.mask
