"""The head that generates, on the device: log-probabilities of prompts, and a token for each row that samples."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.worker.core import Int32, StepPlan, TokenMasks
from baton.worker.executors.cuda.inputs.batch import DeviceBatch
from baton.worker.executors.cuda.inputs.device_step import DeviceStep
from baton.worker.executors.cuda.sampling.prompt_logprobs import DevicePromptLogprobs, PendingPromptLogprobs
from baton.worker.executors.cuda.sampling.sampled_logprobs import PendingLogprobs
from baton.worker.executors.cuda.sampling.sampler import DeviceSampler
from baton.worker.executors.cuda.sampling.undrawn import Undrawn
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.models.decoder import Decoder


class Computed(NamedTuple):
    """What a step leaves behind, on the device or on its way from there."""

    token_ids: Tensor  # of the rows that sample, int32
    left_out: Int32  # of these, those that get none
    logprobs: PendingLogprobs | None = None
    prompt_logprobs: PendingPromptLogprobs | None = None


class GenerateHead:
    """A Head. What it draws is also written behind each row's last known token.

    `draw`, `draw_special` and `score` wait for nothing on the host: they can be captured, one behind the other. They
    use the same memory at every call.
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
    ) -> None:
        # Of every captured step; never used where none is captured.
        self.logits = torch.empty(num_rows if captured else 0, vocab_size, dtype=dtype, device=device)
        self._batch = batch
        self._sampler = DeviceSampler(num_rows, vocab_size, batch, device)
        self._prompt_logprobs = DevicePromptLogprobs(batch, batch_invariant=batch_invariant)
        self._device = device
        self._tokens = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def take_rows(self, plan: StepPlan) -> None:
        self._sampler.admit(plan.admitted)
        self._prompt_logprobs.apply(plan)

    # Captured steps: one token for each row.

    def draw(self, decoder: Decoder[StepInputs], hidden: Tensor, rows: Tensor, seq_lens: Tensor) -> Tensor:
        """Returns a token for each of `hidden` [size, hidden_size]. Leaves their logits in `logits`."""
        size = len(rows)
        logits = decoder.logits(hidden, self.logits[:size])
        self._sampler.draw(logits, rows, seq_lens, self._tokens[:size])
        return self._tokens[:size]

    def draw_special(self, rows: Tensor, seq_lens: Tensor) -> None:
        """Draws again, behind `draw`, for rows with edits, filters and masks."""
        size = len(rows)
        self._sampler.draw_special(self.logits[:size], rows, seq_lens, self._tokens[:size])

    def score(self, rows: Tensor) -> None:
        """Scores, behind all draws, for rows that ask for log-probabilities."""
        size = len(rows)
        self._sampler.score(self.logits[:size], rows, self._tokens[:size])

    # Any other step.

    def run(self, plan: StepPlan, step: DeviceStep, decoder: Decoder[StepInputs], hidden: Tensor) -> Undrawn:
        sampler, rows = self._sampler, step.chosen_rows
        scored = self._prompt_logprobs.of(plan, step.columns, hidden, decoder.logits)
        if not len(rows):
            none = torch.empty(0, dtype=torch.int32, device=self._device)
            return Undrawn(none, none, hidden[:0], _nothing, _nothing, scored)
        logits = decoder.logits(hidden[step.last])
        tokens = torch.empty(len(rows), dtype=torch.int32, device=self._device)
        seq_lens = step.inputs.seq_lens[step.chosen]
        sampler.draw(logits, rows, seq_lens, tokens)
        draw_special = partial(sampler.draw_special, logits, rows, seq_lens, tokens)
        score = partial(sampler.score, logits, rows, tokens)
        return Undrawn(rows, tokens, logits, draw_special, score, scored)

    def finish(self, plan: StepPlan, undrawn: Undrawn, masks: TokenMasks | None, left_out: Int32) -> Computed:
        """Draws and scores what only some rows ask for. Behind `run` or a captured step."""
        sampler, step = self._sampler, undrawn
        wishes = sampler.wishes_of(plan, masks)
        if len(left_out) and (wishes.special or wishes.scored):
            step.rows.index_fill_(0, self._batch.upload(left_out.astype(np.int64)), -1)
        if wishes.special:
            sampler.take_masks(masks)
            step.draw_special()
        if not wishes.scored:
            return Computed(step.tokens, left_out, None, step.prompt_logprobs)
        step.score()
        logprobs = sampler.logprobs(plan, step.logits, step.tokens)
        return Computed(step.tokens, left_out, logprobs, step.prompt_logprobs)


def _nothing() -> None:
    """Where no row samples."""
