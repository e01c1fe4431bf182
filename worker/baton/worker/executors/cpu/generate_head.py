"""The generate head on the host: log-probabilities of prompts, and a token for each row that samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.rpc.errors import ServiceError
from baton.worker.core import Int32, Int64, StepPlan, StepResult, TokenMasks
from baton.worker.executors.cpu.prompt_logprobs import PromptEntries, PromptLogprobs
from baton.worker.executors.cpu.rows import Rows
from baton.worker.layers.cpu.step import StepInputs
from baton.worker.models.config import ModelConfig
from baton.worker.models.model import Model
from baton.worker.sampling.logprobs_mode import LogprobsMode
from baton.worker.sampling.processors.processor_set import NO_PROCESSORS, ProcessorSet, RowTokens
from baton.worker.sampling.sampler import Sampler


class Undrawn(NamedTuple):
    """A step that is not sampled yet."""

    logits: Tensor | None  # of the rows that sample; None without such rows
    prompt_logprobs: dict[int, PromptEntries]


class Changed(NamedTuple):
    """What the processors of some rows did."""

    logits: Tensor | None  # None: no row has a processor
    failed: dict[int, ServiceError]  # by index into the rows


class GenerateHead:
    """Implements Head. Appends sampled tokens to the batch's rows."""

    def __init__(
        self,
        rows: Rows,
        num_rows: int,
        config: ModelConfig,
        processors: ProcessorSet = NO_PROCESSORS,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    ) -> None:
        self._rows = rows
        self._processors = processors
        self._sampler = Sampler(num_rows, config.vocab_size, logprobs_mode)
        self._prompt_logprobs = PromptLogprobs(rows)

    def take_rows(self, plan: StepPlan) -> None:
        for row in plan.freed:
            self._sampler.free(row)
            self._processors.free(row)
            self._prompt_logprobs.free(row)
        for init in plan.admitted:
            self._sampler.admit(init)
            self._processors.admit(init)
            self._prompt_logprobs.admit(init)

    def run(self, plan: StepPlan, step: StepInputs, decoder: Model[StepInputs], hidden: Tensor) -> Undrawn:
        scored = self._prompt_logprobs.of(plan, hidden, decoder.logits)
        if not plan.samples.any():
            return Undrawn(None, scored)
        if not plan.samples.all() or len(hidden) != len(plan.rows):
            last = np.cumsum(plan.num_scheduled_tokens, dtype=np.int64) - 1
            hidden = hidden.index_select(0, torch.from_numpy(last[plan.samples]))
        return Undrawn(decoder.logits(hidden), scored)

    def finish(self, plan: StepPlan, undrawn: Undrawn, masks: TokenMasks | None, left_out: Int32) -> StepResult:
        result = StepResult(plan.step, np.empty(0, np.int32), plan.samples.astype(np.int32))
        result.prompt_logprobs = undrawn.prompt_logprobs
        logits, rows = undrawn.logits, plan.rows[plan.samples].astype(np.int64)
        if logits is None:
            return result
        changed = self._changed(logits, rows, left_out)
        result.failed = {int(np.flatnonzero(plan.samples)[index]): error for index, error in changed.failed.items()}
        left_out = np.union1d(left_out, np.array([*changed.failed], np.int32)).astype(np.int32)
        edited: Tensor | None = changed.logits
        if len(left_out):
            drawn = np.ones(len(rows), np.bool_)
            drawn[left_out] = False
            result.counts[np.flatnonzero(plan.samples)[left_out]] = 0
            kept = torch.from_numpy(drawn)
            rows, logits, edited = rows[drawn], logits[kept], None if edited is None else edited[kept]
            if masks is not None:
                masks = masks.among(drawn)
        if not len(rows):
            return result
        num_outputs = self._rows.num_tokens[rows] - self._rows.num_prompt_tokens[rows]
        token_ids, result.logprobs = self._sampler.sample(logits, rows, num_outputs, masks, edited)
        self._rows.append(rows, token_ids)
        result.token_ids = token_ids.astype(np.int32)
        return result

    def _changed(self, logits: Tensor, rows: Int64, left_out: Int32) -> Changed:
        """Applies the processors of these rows, without those left out, to a copy of the logits."""
        indices = [i for i in self._processors.among(rows.tolist()) if i not in left_out]
        if not indices:
            return Changed(None, {})
        known, changed = self._rows, logits.float().clone()

        def token_ids(some: Sequence[int]) -> Tensor:
            own = rows[some]
            return torch.from_numpy(known.token_ids[own, : known.num_tokens[own].max()])

        prompts, ends = known.num_prompt_tokens[rows].tolist(), known.num_tokens[rows].tolist()
        tokens = RowTokens(prompts, ends, token_ids, torch.tensor)
        return Changed(changed, self._processors.apply(changed, rows.tolist(), indices, tokens))
