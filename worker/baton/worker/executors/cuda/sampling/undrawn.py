"""A step between its forward pass and sampling. Masks may come in between, and exclude some rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from baton.worker.core import Int32, StepPlan, StepResult
from baton.worker.executors.cuda.sampling.prompt_logprobs import PendingPromptLogprobs


class Undrawn(NamedTuple):
    """The results of the forward pass. Rows that are not special already have their tokens."""

    rows: Tensor  # [num_rows, or more] int32, of the batch; -1 is neither sampled nor scored
    tokens: Tensor  # [num_rows] int32
    logits: Tensor  # [num_rows or more, vocab_size]
    draw_special: Callable[[], None]
    score: Callable[[], None]
    prompt_logprobs: PendingPromptLogprobs | None = None


def leave_out(result: StepResult, plan: StepPlan, left_out: Int32) -> None:
    """Removes the tokens of rows in `left_out` from a result with one token for each row that samples."""
    if not len(left_out):
        return
    drawn = np.ones(len(result.token_ids), np.bool_)
    drawn[left_out] = False
    places = np.cumsum(drawn) - 1
    result.counts[np.flatnonzero(plan.samples)[left_out]] = 0
    result.token_ids = result.token_ids[drawn]
    result.logprobs = {int(places[index]): entry for index, entry in result.logprobs.items() if drawn[index]}
