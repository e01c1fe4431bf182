"""The generate head on the device: log-probabilities of prompts, and a token for each row that samples."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.rpc.errors import ServiceError
from baton.worker.adapters.head import HeadAdapters, NoHeadAdapters
from baton.worker.core import Int32, Int64, StepPlan, StepResult, TokenMasks
from baton.worker.executors.cuda.inputs.batch import DeviceBatch
from baton.worker.executors.cuda.inputs.device_step import DeviceStep
from baton.worker.executors.cuda.sampling.processing import DeviceProcessing
from baton.worker.executors.cuda.sampling.prompt_logprobs import DevicePromptLogprobs, PendingPromptLogprobs
from baton.worker.executors.cuda.sampling.sampled_logprobs import PendingLogprobs
from baton.worker.executors.cuda.sampling.sampler import DeviceSampler
from baton.worker.executors.cuda.sampling.undrawn import Undrawn, leave_out
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.models.model import Model
from baton.worker.sampling.logprobs_mode import LogprobsMode
from baton.worker.sampling.processors.processor_set import NO_PROCESSORS, ProcessorSet

_NO_ADAPTERS = NoHeadAdapters()


class Computed(NamedTuple):
    """The results of a step, on the device or being copied from it."""

    token_ids: Tensor  # of the rows that sample, int32
    left_out: Int32  # the rows among them that get no token
    logprobs: PendingLogprobs | None = None
    prompt_logprobs: PendingPromptLogprobs | None = None
    failed: Mapping[int, ServiceError] = MappingProxyType({})  # by index into the rows that sample

    def start_copy(self, token_ids: Tensor) -> PendingTokens:
        """Queues the copy of the tokens to the host. `token_ids`: pinned, [num_rows] int32."""
        own = token_ids[: len(self.token_ids)].copy_(self.token_ids, non_blocking=True)
        return PendingTokens(own, self)


class PendingTokens(NamedTuple):
    """Implements baton.worker.executors.cuda.steps.launched.Pending."""

    token_ids: Tensor  # pinned
    computed: Computed

    def read(self, plan: StepPlan) -> StepResult:
        """Returns the result of the step."""
        logprobs, prompt_logprobs = self.computed.logprobs, self.computed.prompt_logprobs
        result = StepResult(
            step=plan.step,
            token_ids=self.token_ids.numpy().copy(),
            counts=plan.samples.astype(np.int32),
            logprobs={} if logprobs is None else logprobs.read(),
            prompt_logprobs={} if prompt_logprobs is None else prompt_logprobs.read(),
        )
        sampled = np.flatnonzero(plan.samples)
        result.failed = {int(sampled[index]): error for index, error in self.computed.failed.items()}
        leave_out(result, plan, self.computed.left_out)
        return result


class GenerateHead:
    """Implements Head. Appends sampled tokens to the batch's rows.

    `draw`, `draw_special` and `score` never synchronize with the host, so they can be captured in this order. They use
    the same memory at every call.
    """

    def __init__(
        self,
        batch: DeviceBatch,
        num_rows: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        captured: bool,
        batch_invariant: bool = False,
        processors: ProcessorSet = NO_PROCESSORS,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        adapters: HeadAdapters = _NO_ADAPTERS,
    ) -> None:
        # Shared by captured steps; untouched without them.
        self.logits = torch.empty(num_rows if captured else 0, vocab_size, dtype=dtype, device=device)
        self._batch = batch
        self._adapters = adapters
        self._processing = DeviceProcessing(processors, batch)
        self._sampler = DeviceSampler(num_rows, vocab_size, batch, device, logprobs_mode=logprobs_mode)
        self._prompt_logprobs = DevicePromptLogprobs(batch, batch_invariant=batch_invariant)
        self._device = device
        self._tokens = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def take_rows(self, plan: StepPlan) -> None:
        self._sampler.admit(plan.admitted)
        self._processing.take_rows(plan)
        self._prompt_logprobs.apply(plan)

    # Captured steps: one token for each row.

    def draw(self, decoder: Model[StepInputs], hidden: Tensor, rows: Tensor, seq_lens: Tensor) -> Tensor:
        """Returns a token for each of `hidden` [size, hidden_size]. Leaves their logits in `logits`."""
        size = len(rows)
        logits = decoder.logits(hidden, self.logits[:size])
        self._sampler.draw(logits, rows, seq_lens, self._tokens[:size])
        return self._tokens[:size]

    def draw_special(self, rows: Tensor, seq_lens: Tensor) -> None:
        """Samples again, after `draw`, for rows with edits, filters or masks."""
        size = len(rows)
        self._sampler.draw_special(self.logits[:size], rows, seq_lens, self._tokens[:size])

    def score(self, rows: Tensor) -> None:
        """Computes log-probabilities for rows that ask for them, after all draws."""
        size = len(rows)
        self._sampler.score(self.logits[:size], rows, self._tokens[:size])

    # Other steps.

    def run(self, plan: StepPlan, step: DeviceStep, decoder: Model[StepInputs], hidden: Tensor) -> Undrawn:
        sampler, rows = self._sampler, step.chosen_rows

        def of_row(states: Tensor, row: int) -> Tensor:
            return self._logits(decoder, states, np.full(len(states), row))

        scored = self._prompt_logprobs.of(plan, step.columns, hidden, of_row)
        if not len(rows):
            none = torch.empty(0, dtype=torch.int32, device=self._device)
            return Undrawn(none, none, hidden[:0], _nothing, _nothing, scored)
        logits = self._logits(decoder, hidden[step.last], step.columns.rows[step.columns.chosen])
        tokens = torch.empty(len(rows), dtype=torch.int32, device=self._device)
        seq_lens = step.inputs.seq_lens[step.chosen]
        sampler.draw(logits, rows, seq_lens, tokens)
        draw_special = partial(sampler.draw_special, logits, rows, seq_lens, tokens)
        score = partial(sampler.score, logits, rows, tokens)
        return Undrawn(rows, tokens, logits, draw_special, score, scored)

    def _logits(self, decoder: Model[StepInputs], hidden: Tensor, rows: Int64) -> Tensor:
        """Returns the logits of states of these rows of the batch."""
        with self._adapters.head_used(rows):
            return decoder.logits(hidden)

    def finish(self, plan: StepPlan, undrawn: Undrawn, masks: TokenMasks | None, left_out: Int32) -> Computed:
        """Samples special rows and computes log-probabilities. Called after `run` or a captured step."""
        sampler, step = self._sampler, undrawn
        flags = sampler.flags_of(plan, masks)
        processed = self._processing.run(plan, step.logits, left_out)
        left_out = processed.left_out
        if len(left_out) and (flags.special or flags.scored):
            step.rows.index_fill_(0, self._batch.upload(left_out.astype(np.int64)), -1)
        if flags.special:
            sampler.take_masks(masks)
            step.draw_special()
        if not flags.scored:
            return Computed(step.tokens, left_out, None, step.prompt_logprobs, processed.failed)
        processed.restore(step.logits)
        step.score()
        logprobs = sampler.logprobs(plan, step.logits, step.tokens)
        return Computed(step.tokens, left_out, logprobs, step.prompt_logprobs, processed.failed)


def _nothing() -> None:
    """Replaces draws in a step without rows that sample."""
