"""Runs a step on the device, from a plan's columns to sampled tokens. Knows no queue, no engine and no start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.kernels.kv.begun_blocks import clear_begun
from baton.kernels.step_inputs import group_slots, step_inputs
from baton.worker.core import StepPlan
from baton.worker.executors.cuda.adapters.tensors import CudaAdapters
from baton.worker.executors.cuda.inputs.batch import DeviceBatch
from baton.worker.executors.cuda.inputs.columns import StepColumns, step_columns, unroll_outputs
from baton.worker.executors.cuda.inputs.device_states import DeviceStates
from baton.worker.executors.cuda.inputs.device_step import DeviceStep
from baton.worker.executors.cuda.sampling.generate_head import GenerateHead
from baton.worker.executors.cuda.steps.kept_hidden import KeptHidden
from baton.worker.executors.cuda.steps.piecewise import Pieces
from baton.worker.executors.heads import Head
from baton.worker.layers.cuda.paged import PagedCache, Tiles
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.models.model import Model


class Stepper:
    """Decoder and heads over the persistent batch."""

    def __init__(
        self,
        batch: DeviceBatch,
        decoder: Model[StepInputs],
        paged: PagedCache,
        head: GenerateHead | None,
        num_rows: int,
        block_size: int,
        device: torch.device,
        states: Sequence[DeviceStates] = (),
        *,
        batch_invariant: bool = False,
        adapters: CudaAdapters | None = None,
        kept: KeptHidden | None = None,
    ) -> None:
        self._kept = kept  # hidden states that a proposer reads
        self._states = states  # of each group of states
        self.pieces: Pieces | None = None  # graphs for steps that a host launches too slowly
        self._batch = batch
        self._decoder = decoder
        self._paged = paged
        self._head = head  # of decodes; None: the model generates nothing
        self._block_size = block_size
        self._device = device
        self._invariant = batch_invariant
        self._adapters = adapters
        self._ordinals = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)

    @property
    def _generate(self) -> GenerateHead:
        assert self._head is not None, "decodes generate"
        return self._head

    @property
    def logits(self) -> Tensor:
        """Logits of the last `decode`, [num_rows, vocab_size]."""
        return self._generate.logits

    def decode(self, numbers: Tensor, size: int) -> Tensor:
        """Decodes one token for each of `size` rows. `numbers` [2 * size] int32 are rows (-1: padding), then numbers of
        computed tokens.

        Writes the logits to `logits`, and returns tokens in memory that the next call overwrites. Never synchronizes
        with the host, so it can be captured, as can the methods below.
        """
        starts = self._ordinals[: size + 1]
        seq_lens = self._seq_lens[:size]
        inputs = self._inputs(numbers[:size], numbers[size:], starts, size, 1, size, None, seq_lens)
        states = None if self._kept is None else self._kept.states()
        hidden = self._decoder.forward(inputs, hidden_states=states)
        if self._kept is not None and states is not None:
            self._kept.keep(states)
        return self._generate.draw(self._decoder, hidden, numbers[:size], seq_lens)

    def draw_special(self, numbers: Tensor, size: int) -> None:
        """Samples again, after `decode`, for rows with edits, filters or masks."""
        self._generate.draw_special(numbers[:size], self._seq_lens[:size])

    def score(self, numbers: Tensor, size: int) -> None:
        """Computes log-probabilities for rows that ask for them, after all draws."""
        self._generate.score(numbers[:size])

    def run(self, plan: StepPlan, head: Head[DeviceStep, Any, Any], on_written: Callable[[int], None] | None) -> Any:
        """Runs any step, kernel by kernel, without draws that need masks. `on_written`: see Model.forward."""
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
        graphed = pieces if pieces is not None and tiles is not None and pieces.fit(num_tokens) else None
        states = None if self._kept is None else self._kept.states()
        with self._with_adapters(plan, num_tokens, graphed):
            hidden = self._decoder.forward(inputs, graphed, on_written, states)
        if self._kept is not None and states is not None:
            self._kept.give(columns.rows, columns.num_computed, columns.counts, states)
        first = len(up) - len(chosen)  # of the last tokens, which follow the chosen ones
        step = DeviceStep(columns, inputs, chosen_rows, up[first - len(chosen) : first], up[first:])
        return head.run(plan, step, self._decoder, hidden)

    def _with_adapters(self, plan: StepPlan, num_tokens: int, pieces: Pieces | None) -> AbstractContextManager[None]:
        """Uploads which rows have adapters, and has the step launched with them if any has."""
        if self._adapters is None:
            return nullcontext()
        adapted = self._adapters.upload(plan, num_tokens if pieces is None else pieces.padded(num_tokens))
        if pieces is not None:
            pieces.adapted = adapted
        return self._adapters.rows.used(num_tokens) if adapted and pieces is None else nullcontext()

    def _tiles(self, columns: StepColumns) -> Tiles | None:
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
        tiles: Tiles | None,
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
        more_slots: tuple[Tensor, ...] = ()
        if len(batch.block_tables) > 1:
            made = made.new_empty(len(batch.block_tables) - 1, num_tokens)
            group_slots(made, batch.block_tables[1:], positions, rows, query_starts, self._block_size, max_chunk)
            more_slots = made.unbind()
        if self._states:
            clear_begun(self._paged.cache, batch.block_table, rows, computed, seq_lens)
        cuts = self._paged.cut(seq_lens[:num_decodes])
        states = {
            each.group: each.runs(rows, computed, seq_lens, query_starts, num_decodes, num_tokens)
            for each in self._states
        }
        return StepInputs(
            tokens, positions, slots, rows, seq_lens, query_starts, num_decodes, tiles, cuts, more_slots, states
        )
