"""Logits processors in a step on the device: they change the rows that ask for them, between the forward pass and the
sampling of special rows. Other rows and steps cost nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from torch import Tensor

from baton.rpc.errors import ServiceError
from baton.worker.core import Int32, StepPlan
from baton.worker.executors.cuda.inputs.batch import DeviceBatch
from baton.worker.sampling.processors.processor_set import ProcessorSet, RowTokens


class Processed(NamedTuple):
    """What processors did to a step's logits."""

    left_out: Int32  # the rows that get no token: those left out before, and those that failed
    failed: Mapping[int, ServiceError] = MappingProxyType({})  # by index into the rows that sample
    indices: Tensor | None = None  # of the changed rows; None: none was changed
    before: Tensor | None = None  # their logits

    def restore(self, logits: Tensor) -> None:
        """Writes the model's own logits back, of which raw log-probabilities are."""
        if self.indices is not None and self.before is not None:
            logits.index_copy_(0, self.indices, self.before)


class DeviceProcessing:
    """The processors of the persistent batch's rows. Those rows are special: the first draw leaves them out."""

    def __init__(self, processors: ProcessorSet, batch: DeviceBatch) -> None:
        self._processors = processors
        self._batch = batch

    def take_rows(self, plan: StepPlan) -> None:
        """Drops the states of freed rows, and makes those of admitted rows."""
        for row in plan.freed:
            self._processors.free(row)
        for init in plan.admitted:
            self._processors.admit(init)

    def run(self, plan: StepPlan, logits: Tensor, left_out: Int32) -> Processed:
        """Changes logits [rows that sample, vocab_size] in place. Waits for the device if a processor needs a host."""
        rows = plan.rows[plan.samples].tolist()
        indices = [index for index in self._processors.among(rows) if index not in left_out]
        if not indices:
            return Processed(left_out)
        ends = (plan.num_computed_tokens + plan.num_scheduled_tokens)[plan.samples].tolist()

        def token_ids(some: Sequence[int]) -> Tensor:
            own = self._upload([rows[index] for index in some])
            return self._batch.token_ids[:, : max(ends[index] for index in some)].index_select(0, own)

        tokens = RowTokens(self._batch.num_prompt_tokens[rows].tolist(), ends, token_ids, self._upload)
        places = self._upload(indices)
        before = logits.index_select(0, places)
        failed = self._processors.apply(logits, rows, indices, tokens)
        everyone = np.union1d(left_out, np.array([*failed], np.int32)).astype(np.int32)
        return Processed(everyone, failed, places, before)

    def _upload(self, numbers: Sequence[int]) -> Tensor:
        return self._batch.upload(np.array(numbers, np.int64))
