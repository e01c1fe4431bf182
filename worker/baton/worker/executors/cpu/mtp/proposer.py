"""Drafts by an MTP layer on the CPU: from the model's last hidden states, and the next token.

The layer is applied again to its own output for each further draft. A row's keys and values are those of the tokens
that this worker computed for it: a prefix from the cache or of a prefill worker has none, and the layer does not attend
to it. Positions are counted from the first of these tokens, as RoPE depends on distances alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.worker.core import Int32, RowInit, StepPlan
from baton.worker.executors.cpu.draft_batch import DraftBatch
from baton.worker.executors.cpu.eagle3.layer import Grown
from baton.worker.executors.cpu.mtp.checkpoint import MtpLayer
from baton.worker.executors.host.draft_models import DraftMemory
from baton.worker.layers.cpu.step import StepInputs
from baton.worker.layers.norm import norm_of
from baton.worker.models.decoder import Decoder
from baton.worker.models.weights import ModelWeights
from baton.worker.speculation.proposer import Ask

_NOTHING = np.empty(0, np.int32)


@dataclass(slots=True)
class _Row:
    """What is known of a request, by position."""

    init: RowInit
    hidden: Grown  # of positions before `known`, and the layer's own from `end` on
    known: int = 0
    end: int = 0  # the first position whose hidden state the model has not computed, when drafts were asked for


class MtpProposer:
    """Implements Proposer and Guesser, and reads the model's hidden states."""

    costly = True

    def __init__(
        self, layer: MtpLayer, model: ModelWeights, num_layers: int, dtype: torch.dtype, memory: DraftMemory
    ) -> None:
        """`model` and `num_layers`: of the model that verifies."""
        config = layer.config
        self.hidden_layers = (num_layers,)
        self._batch = DraftBatch(config, bytes(16), dtype, memory, config.vocab_size)
        device = self._batch.device
        self._decoder = Decoder(config, layer.weights, device)
        self._model_norm = norm_of(model.norm, config.norm)
        self._kernels = device.kernels
        self._reads_normed = layer.reads_normed
        self._hidden_size, self._dtype = config.hidden_size, dtype
        self._rows: dict[int, _Row] = {}

    def admit(self, init: RowInit) -> None:
        """Begins a row of which nothing is known."""
        row = int(init.row)
        self._batch.release(row)
        self._rows[row] = _Row(init, Grown((), self._hidden_size, self._dtype))

    def free(self, row: int, token_ids: Int32) -> None:
        """Drops what is kept of a row."""
        self._batch.release(row)
        self._rows.pop(row, None)

    def sleep(self) -> int:
        """Frees the pages of all blocks, whose KV is computed again when it is needed. Returns their bytes."""
        return self._batch.sleep()

    def close(self) -> None:
        """Does nothing: the memory of weights and KV ends with this object."""

    def take_hidden(self, plan: StepPlan, hidden: Tensor) -> None:
        """Stores the normed hidden states [plan.num_tokens, hidden_size] of a computed step."""
        normed = hidden if self._model_norm is None else self._model_norm.apply(hidden, self._kernels)
        start = 0
        columns = (plan.rows.tolist(), plan.num_computed_tokens.tolist(), plan.num_scheduled_tokens.tolist())
        for number, first, count in zip(*columns, strict=True):
            if number in self._rows:
                self._store(number, first, normed[start : start + count])
            start += count

    def propose(self, asked: Sequence[Ask]) -> list[Int32 | Exception]:
        found: dict[int, Int32 | Exception] = {}
        shifted = [own for ask in asked if (own := self._shifted(ask)) is not None]
        for own, drafts in zip(shifted, self._batch.propose(shifted, self), strict=True):
            found[own.row] = drafts
        return [found.get(ask.row, _NOTHING) for ask in asked]

    def forward(self, plan: StepPlan, inputs: StepInputs) -> Tensor:
        """Returns the layer's output for a step of the batch. Keeps it where the model has no hidden states yet."""
        spans = [
            (row, row.hidden.start + first, row.hidden.start + first + count)
            for row, first, count in zip(
                map(self._rows.__getitem__, plan.rows.tolist()),
                plan.num_computed_tokens.tolist(),
                plan.num_scheduled_tokens.tolist(),
                strict=True,
            )
        ]
        hidden = torch.cat([row.hidden.read(first, stop) for row, first, stop in spans])
        out, done = self._decoder.forward(inputs, hidden=hidden), 0
        for row, first, stop in spans:
            done += stop - first
            if stop >= row.end:
                last = out[done - 1 : done]
                row.hidden.write(stop, self._decoder.normed(last) if self._reads_normed else last)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of rows that `forward` returned."""
        return self._decoder.logits(hidden)

    def _store(self, number: int, first: int, normed: Tensor) -> None:
        row = self._rows[number]
        if first > row.known or row.known == 0:  # what is before was computed elsewhere
            row.hidden.start = first
            # The layer's token at a position is the one behind it.
            self._batch.admit(number, row.init.num_prompt_tokens - first - 1, row.init.sampling)
        row.hidden.write(first, normed)
        # Those behind a wrong draft are overwritten.
        row.known = first + len(normed)
        self._batch.rewind(number, first - row.hidden.start)

    def _shifted(self, ask: Ask) -> Ask | None:
        """Returns what the batch is asked for: the tokens behind those whose hidden states are known."""
        row = self._rows.get(ask.row)
        end = len(ask.token_ids) - 1  # of the last one, no hidden state is known
        if row is None or not row.hidden.start < end <= row.known:
            return None
        row.end = end
        return Ask(ask.row, ask.token_ids[row.hidden.start + 1 :], ask.most)
