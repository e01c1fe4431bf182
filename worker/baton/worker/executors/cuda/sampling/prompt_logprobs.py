"""Log-probabilities of prompt tokens on the device, for rows whose requests ask for them. Other rows cost nothing.

Logits are computed for some positions at a time, and stay on the device. A few numbers per position are copied to the
host, asynchronously.
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

MAX_POSITIONS = 256  # positions per chunk of logits


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens of one row's prompt that a step predicts."""

    index: int  # into the plan's rows
    row: int
    first: int  # prompt position of the first of them
    begin: int  # index in the step of the token that predicts the first one
    count: int


@dataclass(slots=True)
class PendingPromptLogprobs:
    """Log-probabilities that are being copied to the host."""

    parts: list[tuple[PromptPart, list[Tensor]]] = field(default_factory=list)  # pinned, the fields of RowLogprobs

    def read(self) -> dict[int, tuple[int, list[TokenLogprobs]]]:
        """Returns StepResult.prompt_logprobs. Called when the step is done."""
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
    """The rows of the persistent batch that ask for log-probabilities, and the number of their alternatives."""

    def __init__(self, batch: DeviceBatch, *, batch_invariant: bool = False) -> None:
        self._batch = batch
        self._invariant = batch_invariant
        self._num_top: dict[int, int] = {}  # by row

    def apply(self, plan: StepPlan) -> None:
        """Drops freed rows, and stores the parameters of admitted ones."""
        for row in plan.freed:
            self._num_top.pop(row, None)
        for init in plan.admitted:
            self._num_top.pop(init.row, None)
            if init.sampling.prompt_logprobs is not None:
                self._num_top[init.row] = init.sampling.prompt_logprobs

    def of(
        self, plan: StepPlan, columns: StepColumns, hidden: Tensor, logits: Callable[[Tensor, int], Tensor]
    ) -> PendingPromptLogprobs | None:
        """Starts to compute entries from the step's residual stream [num_tokens, hidden_size]. None: no row asks.

        `logits`: of states of one row of the batch.
        """
        if not self._num_top:
            return None
        pending = PendingPromptLogprobs()
        for part in prompt_parts(plan, columns, self._batch.num_prompt_tokens, self._num_top.keys()):
            token_ids = self._batch.token_ids[part.row, part.first : part.first + part.count].long()
            states = hidden[part.begin : part.begin + part.count]
            found = self._scored(states, token_ids, logits, part.row)
            pending.parts.append((part, [to_pinned(column) for column in found]))
        return pending

    def _scored(
        self, hidden: Tensor, token_ids: Tensor, logits: Callable[[Tensor, int], Tensor], row: int
    ) -> list[Tensor]:
        pieces: list[RowLogprobs] = []
        for begin in range(0, len(hidden), MAX_POSITIONS):
            states, wanted = hidden[begin : begin + MAX_POSITIONS], token_ids[begin : begin + MAX_POSITIONS]
            count = len(states)
            if self._invariant:
                # PyTorch splits a sum over a row depending on the number of rows, so that number is constant.
                states = functional.pad(states, (0, 0, 0, MAX_POSITIONS - count))
                wanted = functional.pad(wanted, (0, MAX_POSITIONS - count))
            found = row_logprobs(logits(states, row), wanted, self._num_top[row])
            pieces.append(RowLogprobs(*(column[:count] for column in found)))
        return [torch.cat(column) for column in zip(*pieces, strict=True)]


def prompt_parts(
    plan: StepPlan, columns: StepColumns, num_prompt_tokens: NDArray[np.int64], asking: Container[int]
) -> Iterator[PromptPart]:
    """Yields the prompt tokens that the step predicts, of rows in `asking`. num_prompt_tokens is by row."""
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
    """Queues a copy to pinned host memory. Returns the copy."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor, non_blocking=True)
