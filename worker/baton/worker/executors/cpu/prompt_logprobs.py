"""Log-probabilities of prompt tokens, for rows whose requests ask for them. Other rows cost nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from baton.kernels.reference.sampling.logprobs import row_logprobs
from baton.worker.core import RowInit, StepPlan, TokenLogprobs
from baton.worker.executors.cpu.rows import Rows

# Positions per chunk of logits: 256 with a vocabulary of 128 Ki take 128 MiB.
_MAX_POSITIONS = 256

PromptEntries = tuple[int, list[TokenLogprobs]]  # the first prompt position, and the entries from there on


class PromptLogprobs:
    """The rows that ask for log-probabilities, and the number of their alternatives."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._num_top: dict[int, int] = {}  # by row

    def admit(self, init: RowInit) -> None:
        """Stores a row's request for log-probabilities."""
        if init.sampling.prompt_logprobs is None:
            self._num_top.pop(init.row, None)
        else:
            self._num_top[init.row] = init.sampling.prompt_logprobs

    def free(self, row: int) -> None:
        self._num_top.pop(row, None)

    def of(self, plan: StepPlan, hidden: Tensor, logits: Callable[[Tensor, int], Tensor]) -> dict[int, PromptEntries]:
        """Returns entries by index into the plan's rows, from the step's hidden states [num_tokens, hidden_size].

        `logits`: of states of one row of the batch.
        """
        found: dict[int, PromptEntries] = {}
        if not self._num_top:
            return found
        ends = np.cumsum(plan.num_scheduled_tokens, dtype=np.int64).tolist()
        for index, row in enumerate(plan.rows.tolist()):
            num_top = self._num_top.get(row)
            if num_top is None:
                continue
            first = int(plan.num_computed_tokens[index]) + 1  # position that the first hidden state predicts
            count = min(int(plan.num_scheduled_tokens[index]), int(self._rows.num_prompt_tokens[row]) - first)
            if count > 0:
                begin = ends[index] - int(plan.num_scheduled_tokens[index])
                token_ids = self._rows.token_ids[row, first : first + count]
                states = hidden[begin : begin + count]
                found[index] = (first, _entries(states, token_ids, num_top, logits, row))
        return found


def _entries(
    hidden: Tensor,
    token_ids: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    num_top: int,
    logits: Callable[[Tensor, int], Tensor],
    row: int,
) -> list[TokenLogprobs]:
    entries: list[TokenLogprobs] = []
    wanted = torch.from_numpy(token_ids.astype(np.int64)).to(hidden.device)
    for begin in range(0, len(hidden), _MAX_POSITIONS):
        end = begin + _MAX_POSITIONS
        found = row_logprobs(logits(hidden[begin:end], row), wanted[begin:end], num_top)
        columns = (found.logprobs, found.ranks, found.top_token_ids, found.top_logprobs)
        for logprob, rank, top_ids, top in zip(*(column.tolist() for column in columns), strict=True):
            entries.append(TokenLogprobs(logprob, rank, tuple(top_ids), tuple(top)))
    return entries
