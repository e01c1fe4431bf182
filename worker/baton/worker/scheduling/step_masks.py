"""Collects the token masks of a step's constrained rows for the executor. Decides nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from baton.worker.core import TokenMasks
from baton.worker.requests.state import RequestState
from baton.worker.scheduling.step_draft import ScheduledStep


def token_masks(scheduled: ScheduledStep, constrained: NDArray[np.bool_]) -> TokenMasks:
    """Returns a copy of the masks of these rows. All of them sample, and their grammars are ready."""
    places = np.cumsum(scheduled.plan.samples, dtype=np.int32) - 1
    states = [scheduled.states[index] for index in np.flatnonzero(constrained).tolist()]
    return TokenMasks(places[constrained].astype(np.int32), np.stack([_mask_of(state) for state in states]))


def _mask_of(state: RequestState) -> NDArray[np.int32]:
    grammar = state.grammar
    assert grammar is not None, f"{state.request.request_id} has no constraint"
    assert grammar.ready, f"{state.request.request_id} is scheduled without its mask"
    return grammar.mask
