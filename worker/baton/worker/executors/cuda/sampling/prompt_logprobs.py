"""What the model thought of the tokens of prompts, on the device, for rows whose requests ask. Others cost nothing.

Logits are made for some positions at a time, and go no further than the device: what is read back is a few numbers a
position, without the host waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from baton.kernels.reference.sampling.logprobs import RowLogprobs, row_logprobs
from baton.worker.core import StepPlan, TokenLogprobs
from baton.worker.executors.cuda.inputs.batch import DeviceBatch
from baton.worker.executors.cuda.inputs.columns import StepColumns

MAX_POSITIONS = 256  # whose logits are there at once


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens of one row's prompt that a step foretells."""

    index: int  # into the plan's rows
    row: int
    first: int  # place in the prompt of the first of them
    begin: int  # among the step's tokens: whose result foretells that first one
    count: int


@dataclass(slots=True)
class PendingPromptLogprobs:
    """Log-probabilities on their way to the host."""

    parts: list[tuple[PromptPart, list[Tensor]]] = field(default_factory=list)  # pinned, as RowLogprobs has them

    def read(self) -> dict[int, tuple[int, list[TokenLogprobs]]]:
        """As StepResult.prompt_logprobs. Call when the step is done."""
        return {
            part.index: (
                part.first,
                [
                    TokenLogprobs(logprob, rank, tuple(top_ids), tuple(top))
                    for logprob, rank, top_ids, top in zip(*(column.tolist() for column in columns), strict=True)
                ],
            )
            for part, columns in self.parts
        }


class DevicePromptLogprobs:
    """Which rows of the persistent batch ask, and for how many alternatives."""

    def __init__(self, batch: DeviceBatch, *, batch_invariant: bool = False) -> None:
        self._batch = batch
        self._invariant = batch_invariant
        self._num_top: dict[int, int] = {}  # by row

    def apply(self, plan: StepPlan) -> None:
        """Forgets freed rows, and takes the wishes of admitted ones in place of those that the rows had."""
        for row in plan.freed:
            self._num_top.pop(row, None)
        for init in plan.admitted:
            self._num_top.pop(init.row, None)
            if init.sampling.prompt_logprobs is not None:
                self._num_top[init.row] = init.sampling.prompt_logprobs

    def of(
        self, plan: StepPlan, columns: StepColumns, hidden: Tensor, logits: Callable[[Tensor], Tensor]
    ) -> PendingPromptLogprobs | None:
        """For the residual stream [num_tokens, hidden_size] of all that the step computes. None: no row asks."""
        if not self._num_top:
            return None
        pending = PendingPromptLogprobs()
        for part in prompt_parts(plan, columns, self._batch.num_prompt_tokens, self._num_top.keys()):
            token_ids = self._batch.token_ids[part.row, part.first : part.first + part.count].long()
            states = hidden[part.begin : part.begin + part.count]
            found = self._scored(states, token_ids, self._num_top[part.row], logits)
            pending.parts.append((part, [to_pinned(column) for column in found]))
        return pending

    def _scored(
        self, hidden: Tensor, token_ids: Tensor, num_top: int, logits: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        pieces: list[RowLogprobs] = []
        for begin in range(0, len(hidden), MAX_POSITIONS):
            states, wanted = hidden[begin : begin + MAX_POSITIONS], token_ids[begin : begin + MAX_POSITIONS]
            count = len(states)
            if self._invariant:
                # How torch cuts a sum over a row depends on how many rows there are: always as many.
                states = functional.pad(states, (0, 0, 0, MAX_POSITIONS - count))
                wanted = functional.pad(wanted, (0, MAX_POSITIONS - count))
            found = row_logprobs(logits(states), wanted, num_top)
            pieces.append(RowLogprobs(*(column[:count] for column in found)))
        return [torch.cat(column) for column in zip(*pieces, strict=True)]


def prompt_parts(
    plan: StepPlan, columns: StepColumns, num_prompt_tokens: NDArray[np.int64], asking: Container[int]
) -> Iterator[PromptPart]:
    """What the step's sequences foretell of the prompts of rows that ask; num_prompt_tokens is by row."""
    starts = columns.starts
    for sequence, row in enumerate(columns.rows.tolist()):
        if row not in asking:
            continue
        first = int(columns.num_computed[sequence]) + 1
        count = min(int(columns.counts[sequence]), int(num_prompt_tokens[row]) - first)
        if count > 0:
            index = int(np.flatnonzero(plan.rows == row)[0])
            yield PromptPart(index, row, first, int(starts[sequence]), count)


def to_pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned host memory, complete when the stream has come so far."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor, non_blocking=True)
