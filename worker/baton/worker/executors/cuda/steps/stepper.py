"""One step on the device, from a plan's columns to sampled tokens. Knows no queue, no engine and no start."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.kernels.attention.prefill import PrefillTiles
from baton.kernels.step_inputs import step_inputs
from baton.worker.core import Int32, StepPlan, TokenMasks
from baton.worker.executors.cuda.inputs.batch import DeviceBatch
from baton.worker.executors.cuda.inputs.columns import StepColumns, step_columns, unroll_outputs
from baton.worker.executors.cuda.sampling.prompt_logprobs import DevicePromptLogprobs, PendingPromptLogprobs
from baton.worker.executors.cuda.sampling.sampled_logprobs import PendingLogprobs
from baton.worker.executors.cuda.sampling.sampler import DeviceSampler
from baton.worker.executors.cuda.steps.piecewise import Pieces
from baton.worker.executors.cuda.steps.undrawn import Undrawn
from baton.worker.layers.cuda.attention import PagedAttention
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.models.decoder import Decoder


class Computed(NamedTuple):
    """What a step leaves behind, on the device or on its way from there."""

    token_ids: Tensor  # of the rows that sample, int32
    left_out: Int32  # of these, those that get none
    logprobs: PendingLogprobs | None = None
    prompt_logprobs: PendingPromptLogprobs | None = None


def _nothing() -> None:
    """Where no row samples."""


class Stepper:
    """Decoder and sampler over the persistent batch."""

    def __init__(
        self,
        batch: DeviceBatch,
        decoder: Decoder[StepInputs],
        paged: PagedAttention,
        sampler: DeviceSampler,
        prompt_logprobs: DevicePromptLogprobs,
        logits: Tensor,
        num_rows: int,
        block_size: int,
        device: torch.device,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.pieces: Pieces | None = None  # graphs for steps of few tokens
        self.logits = logits  # [num_rows, vocab], of `decode`
        self._batch = batch
        self._decoder = decoder
        self._paged = paged
        self._sampler = sampler
        self._prompt_logprobs = prompt_logprobs
        self._block_size = block_size
        self._device = device
        self._invariant = batch_invariant
        self._ordinals = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def decode(self, numbers: Tensor, size: int) -> Tensor:
        """One token for each of `size` rows: numbers [2 * size] int32 are rows (-1: padding) and computed tokens.

        The model's logits are left in `logits`, the tokens in memory that the next call writes again. Waits for nothing
        on the host: can be captured, as can what follows.
        """
        starts = self._ordinals[: size + 1]
        seq_lens = self._seq_lens[:size]
        inputs = self._inputs(numbers[:size], numbers[size:], starts, size, 1, size, None, seq_lens)
        logits = self._decoder.logits(self._decoder.forward(inputs), self.logits[:size])
        self._sampler.draw(logits, numbers[:size], seq_lens, self._tokens[:size])
        return self._tokens[:size]

    def draw_special(self, numbers: Tensor, size: int) -> None:
        """Behind `decode`, for rows with edits, filters and masks."""
        self._sampler.draw_special(self.logits[:size], numbers[:size], self._seq_lens[:size], self._tokens[:size])

    def score(self, numbers: Tensor, size: int) -> None:
        """Behind all draws, for rows that ask for log-probabilities."""
        self._sampler.score(self.logits[:size], numbers[:size], self._tokens[:size])

    def run(self, plan: StepPlan) -> Undrawn:
        """Any step, launched kernel by kernel, up to its draws of what only some rows ask for."""
        columns = step_columns(plan, self._batch.rows_of(plan))
        if self._invariant:
            columns = unroll_outputs(columns, self._batch.num_prompt_tokens[plan.rows])
        starts, chosen = columns.starts, columns.chosen
        up = self._batch.upload(
            np.concatenate(
                (columns.rows, columns.num_computed, starts, columns.rows[chosen], chosen, starts[chosen + 1] - 1)
            )
        )
        num_seqs = len(columns.rows)
        sizes = [num_seqs, num_seqs, num_seqs + 1, len(chosen), len(chosen), len(chosen)]
        rows, computed, query_starts, chosen_rows, _, _ = up.int().split(sizes)  # type: ignore[no-untyped-call]
        num_tokens, longest = int(starts[-1]), int(columns.counts.max())
        tiles = self._tiles(columns)
        inputs = self._inputs(rows, computed, query_starts, num_tokens, longest, columns.num_decodes, tiles)
        pieces = self.pieces
        graphed = pieces is not None and tiles is not None and pieces.fit(num_tokens)
        hidden = self._decoder.forward(inputs, pieces if graphed else None)
        scored = self._prompt_logprobs.of(plan, columns, hidden, self._decoder.logits)
        if not len(chosen):
            none = torch.empty(0, dtype=torch.int32, device=self._device)
            return Undrawn(none, none, hidden[:0], _nothing, _nothing, scored)
        picked, last = up[-2 * len(chosen) :].view(2, -1)
        logits = self._decoder.logits(hidden[last])
        tokens = torch.empty(len(chosen), dtype=torch.int32, device=self._device)
        seq_lens = inputs.seq_lens[picked]
        self._sampler.draw(logits, chosen_rows, seq_lens, tokens)
        draw_special = partial(self._sampler.draw_special, logits, chosen_rows, seq_lens, tokens)
        score = partial(self._sampler.score, logits, chosen_rows, tokens)
        return Undrawn(chosen_rows, tokens, logits, draw_special, score, scored)

    def finish(self, plan: StepPlan, step: Undrawn, masks: TokenMasks | None, left_out: Int32) -> Computed:
        """Behind `run` or a graph's step: a token for each row that samples, but those left out."""
        wishes = self._sampler.wishes_of(plan, masks)
        if len(left_out) and (wishes.special or wishes.scored):
            step.rows.index_fill_(0, self._batch.upload(left_out.astype(np.int64)), -1)
        if wishes.special:
            self._sampler.take_masks(masks)
            step.draw_special()
        if not wishes.scored:
            return Computed(step.tokens, left_out, None, step.prompt_logprobs)
        step.score()
        return Computed(
            step.tokens, left_out, self._sampler.logprobs(plan, step.logits, step.tokens), step.prompt_logprobs
        )

    def _tiles(self, columns: StepColumns) -> PrefillTiles | None:
        decodes = columns.num_decodes
        counts, prefixes = columns.counts[decodes:], columns.num_computed[decodes:]
        counts = np.where(columns.rows[decodes:] < 0, 0, counts)
        if not counts.any():
            return None
        return self._paged.tiles(counts.tolist(), prefixes.tolist())

    def _inputs(
        self,
        rows: Tensor,
        computed: Tensor,
        query_starts: Tensor,
        num_tokens: int,
        max_chunk: int,
        num_decodes: int,
        tiles: PrefillTiles | None,
        seq_lens: Tensor | None = None,
    ) -> StepInputs:
        made = torch.empty(3 * num_tokens + len(rows), dtype=torch.int32, device=self._device)
        tokens, positions, slots = made[: 3 * num_tokens].view(3, num_tokens)
        seq_lens = made[3 * num_tokens :] if seq_lens is None else seq_lens
        batch = self._batch
        step_inputs(
            tokens,
            positions,
            slots,
            seq_lens,
            batch.token_ids,
            batch.block_table,
            rows,
            computed,
            query_starts,
            self._block_size,
            max_chunk,
        )
        cuts = self._paged.cut(seq_lens[:num_decodes])
        return StepInputs(tokens, positions, slots, rows, seq_lens, query_starts, num_decodes, tiles, cuts)
