"""The generate head on the host: log-probabilities of prompts, and a token for each row that samples."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.worker.core import Int32, StepPlan, StepResult, TokenMasks
from baton.worker.executors.cpu.prompt_logprobs import PromptEntries, PromptLogprobs
from baton.worker.executors.cpu.rows import Rows
from baton.worker.layers.cpu.step import StepInputs
from baton.worker.models.config import ModelConfig
from baton.worker.models.model import Model
from baton.worker.sampling.sampler import Sampler


class Undrawn(NamedTuple):
    """A step that is not sampled yet."""

    logits: Tensor | None  # of the rows that sample; None without such rows
    prompt_logprobs: dict[int, PromptEntries]


class GenerateHead:
    """Implements Head. Appends sampled tokens to the batch's rows."""

    def __init__(self, rows: Rows, num_rows: int, config: ModelConfig) -> None:
        self._rows = rows
        self._sampler = Sampler(num_rows, config.vocab_size)
        self._prompt_logprobs = PromptLogprobs(rows)

    def take_rows(self, plan: StepPlan) -> None:
        for row in plan.freed:
            self._sampler.free(row)
            self._prompt_logprobs.free(row)
        for init in plan.admitted:
            self._sampler.admit(init)
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
        if logits is not None and len(left_out):
            drawn = np.ones(len(rows), np.bool_)
            drawn[left_out] = False
            result.counts[np.flatnonzero(plan.samples)[left_out]] = 0
            rows, logits = rows[drawn], logits[torch.from_numpy(drawn)]
            if masks is not None:
                masks = masks.among(drawn)
        if logits is None or not len(rows):
            return result
        num_outputs = self._rows.num_tokens[rows] - self._rows.num_prompt_tokens[rows]
        token_ids, result.logprobs = self._sampler.sample(logits, rows, num_outputs, masks)
        self._rows.append(rows, token_ids)
        result.token_ids = token_ids.astype(np.int32)
        return result
