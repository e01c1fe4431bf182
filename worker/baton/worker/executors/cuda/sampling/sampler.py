"""From logits to tokens on the device: the same few launches whatever the rows ask for. Never waits for the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.sampling import SamplingState, Sizes, sample_special, sample_tokens, score_tokens
from baton.kernels.sampling.columns import SPECIAL
from baton.worker.core import Int32, RowInit, SamplingParams, StepPlan, TokenMasks
from baton.worker.executors.cuda.inputs.batch import DeviceBatch
from baton.worker.executors.cuda.inputs.uploads import Patches, PinnedRing
from baton.worker.executors.cuda.sampling.row_parameters import (
    RowLists,
    column_words,
    is_penalized,
    row_lists,
    wishes_of,
)
from baton.worker.executors.cuda.sampling.sampled_logprobs import PendingLogprobs

_USUAL_LISTS = 1 << 14  # words


class StepWishes(NamedTuple):
    """What a step's rows ask for beyond a draw from their plain logits."""

    special: bool  # some row has edits, filters or a mask
    scored: bool  # some row asks for log-probabilities


class DeviceSampler:
    """Sampling parameters of the persistent batch's rows.

    What a row gets depends on nothing but its own logits, parameters and tokens.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, batch: DeviceBatch, device: torch.device, sizes: Sizes | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._batch = batch
        self._device = device
        max_model_len = batch.token_ids.shape[1]
        self._state = SamplingState(num_rows, vocab_size, max_model_len, device, sizes or Sizes())
        columns = self._state.columns
        self._patches = Patches(columns.words, columns.words.numel())
        self._lists_up = PinnedRing(_USUAL_LISTS, torch.int32)
        self._masks_up = PinnedRing(len(self._state.mask_of) + 8 * self._state.num_words, torch.int32, 4)
        self._masked = False  # whether the device has masks of the step before
        self._params: list[SamplingParams | None] = [None] * num_rows
        self._special = np.zeros(num_rows, np.bool_)
        self._asking = np.zeros(num_rows, np.bool_)  # for log-probabilities
        self._lists: dict[int, Tensor] = {}  # by row: keeps the memory that the row's columns point to

    @property
    def state(self) -> SamplingState:
        """The device's memory."""
        return self._state

    def admit(self, inits: list[RowInit]) -> None:
        """Takes rows' parameters to the device, and counts their known tokens where these count."""
        if not inits:
            return
        lists = [row_lists(init.sampling, self._vocab_size) for init in inits]
        for init, each in zip(inits, lists, strict=True):
            self._params[init.row] = init.sampling
            self._special[init.row] = bool(wishes_of(init.sampling, each) & SPECIAL.value)
            self._asking[init.row] = init.sampling.logprobs is not None
        addresses, counted = self._upload_lists(inits, lists)
        words = column_words(inits, lists, addresses, self._vocab_size)
        rows = np.array([init.row for init in inits], np.int64)
        places = rows[:, None] + self._state.columns.stride * np.arange(words.shape[1])
        self._patches.write(places.reshape(-1), words.reshape(-1))
        if counted is not None:
            self._restart_counts(inits, counted)

    def _upload_lists(self, inits: list[RowInit], lists: list[RowLists]) -> tuple[list[int], Tensor | None]:
        """In one copy: lists, whose addresses it returns, then rows and lengths [2, n] of rows that count tokens."""
        for init in inits:
            self._lists.pop(init.row, None)
        counting = [(init.row, len(init.token_ids)) for init in inits if is_penalized(init.sampling)]
        words = np.concatenate([*(each.words for each in lists), np.array(counting, np.int32).T.reshape(-1)])
        if not len(words):
            return [0] * len(inits), None
        up = self._lists_up.to_device(words, self._device)
        addresses = []
        first = 0
        for init, each in zip(inits, lists, strict=True):
            addresses.append(up.data_ptr() + 4 * first)
            if len(each.words):
                self._lists[init.row] = up
            first += len(each.words)
        return addresses, up[first:].view(2, -1) if counting else None

    def _restart_counts(self, inits: list[RowInit], counted: Tensor) -> None:
        columns, tokens = self._state.columns, self._batch.token_ids
        longest = max(len(init.token_ids) for init in inits if is_penalized(init.sampling))
        rows, lengths = counted
        self._state.counts.restart(rows, lengths, longest, columns.words, columns.stride, tokens)

    def wishes_of(self, plan: StepPlan, masks: TokenMasks | None) -> StepWishes:
        """What `draw_special` and `score` are needed for."""
        rows = plan.rows[plan.samples]
        special = masks is not None or bool(self._special[rows].any())
        return StepWishes(special, bool(self._asking[rows].any()))

    def take_masks(self, masks: TokenMasks | None) -> None:
        """Takes the next draw's masks to the device, in one copy."""
        state = self._state
        if masks is None:
            if self._masked:
                state.mask_of.fill_(-1)
            self._masked = False
            return
        count, num_rows, num_words = len(masks.indices), len(state.mask_of), state.num_words

        def fill(words: Int32) -> None:
            words[:num_rows] = -1
            words[masks.indices] = np.arange(count)
            words[num_rows:].reshape(count, num_words)[:] = masks.bits[:, :num_words]

        length = num_rows + count * num_words
        self._masks_up.fill_and_copy(length, fill, state.mask_words[:length])
        self._masked = True

    def draw(self, logits: Tensor, batch_rows: Tensor, seq_lens: Tensor, out: Tensor) -> None:
        """Tokens `out` [num_rows] int32 of rows that ask for nothing special, for logits [num_rows, vocab].

        They are also written behind each row's last known token.
        """
        sample_tokens(logits, out, self._state, batch_rows, seq_lens, self._batch.token_ids)

    def draw_special(self, logits: Tensor, batch_rows: Tensor, seq_lens: Tensor, out: Tensor) -> None:
        """The same of all others. Behind `draw` and, where the step has masks, `take_masks`."""
        sample_special(logits, out, self._state, batch_rows, seq_lens, self._batch.token_ids)

    def score(self, logits: Tensor, batch_rows: Tensor, tokens: Tensor) -> None:
        """Leaves the log-probabilities of drawn tokens [num_rows] and their alternatives for `logprobs`."""
        score_tokens(logits, tokens, self._state, batch_rows)

    def logprobs(self, plan: StepPlan, logits: Tensor, tokens: Tensor) -> PendingLogprobs:
        """What `score` found for logits and tokens of the plan's rows that sample."""
        rows = plan.rows[plan.samples]
        asking: NDArray[np.int64] = np.flatnonzero(self._asking[rows])
        sampling = [self._of(row) for row in rows[asking].tolist()]
        return PendingLogprobs.of(asking.tolist(), sampling, self._state.found[: len(rows)], logits, tokens)

    def _of(self, row: int) -> SamplingParams:
        params = self._params[row]
        assert params is not None, f"row {row} was never admitted"
        return params
