"""Samples tokens on the device, with the same few launches for all parameters. Never waits for the host."""

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
from baton.worker.executors.cuda.sampling.row_parameters import RowLists, column_words, flags_of, row_lists
from baton.worker.executors.cuda.sampling.sampled_logprobs import PendingLogprobs
from baton.worker.sampling.logprobs_mode import LogprobsMode
from baton.worker.sampling.penalties import is_penalized

_USUAL_LISTS = 1 << 14  # words


class StepFlags(NamedTuple):
    """The kernels that a step needs in addition to `draw`."""

    special: bool  # for rows with edits, filters or a mask
    scored: bool  # for rows that ask for log-probabilities


class DeviceSampler:
    """The sampling parameters of the persistent batch's rows.

    A row's token depends only on its own logits, parameters and tokens.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        batch: DeviceBatch,
        device: torch.device,
        sizes: Sizes | None = None,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    ) -> None:
        self._mode = logprobs_mode
        self._vocab_size = vocab_size
        self._batch = batch
        self._device = device
        max_model_len = batch.token_ids.shape[1]
        self._state = SamplingState(
            num_rows, vocab_size, max_model_len, device, sizes or Sizes(), logprobs_mode.is_processed
        )
        columns = self._state.columns
        self._patches = Patches(columns.words, columns.words.numel())
        self._lists_up = PinnedRing(_USUAL_LISTS, torch.int32)
        self._masks_up = PinnedRing(len(self._state.mask_of) + 8 * self._state.num_words, torch.int32, 4)
        self._masked = False  # whether the device has masks of the previous step
        self._params: list[SamplingParams | None] = [None] * num_rows
        self._special = np.zeros(num_rows, np.bool_)
        self._asking = np.zeros(num_rows, np.bool_)  # for log-probabilities
        self._lists: dict[int, Tensor] = {}  # by row: keeps the memory that the row's columns point to

    @property
    def state(self) -> SamplingState:
        """The parameters in device memory."""
        return self._state

    def admit(self, inits: list[RowInit]) -> None:
        """Uploads the parameters of rows, and counts the known tokens of rows with penalties."""
        if not inits:
            return
        lists = [row_lists(init.sampling, self._vocab_size) for init in inits]
        for init, each in zip(inits, lists, strict=True):
            self._params[init.row] = init.sampling
            flags = flags_of(init.sampling, each, self._mode.is_processed)
            self._special[init.row] = bool(flags & SPECIAL.value)
            self._asking[init.row] = init.sampling.logprobs is not None
        addresses, counted = self._upload_lists(inits, lists)
        words = column_words(inits, lists, addresses, self._vocab_size, self._mode.is_processed)
        rows = np.array([init.row for init in inits], np.int64)
        indices = rows[:, None] + self._state.columns.stride * np.arange(words.shape[1])
        self._patches.write(indices.reshape(-1), words.reshape(-1))
        if counted is not None:
            self._restart_counts(inits, counted)

    def _upload_lists(self, inits: list[RowInit], lists: list[RowLists]) -> tuple[list[int], Tensor | None]:
        """Uploads lists, and rows and lengths [2, n] of rows that count tokens. Returns lists' addresses, and these."""
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

    def flags_of(self, plan: StepPlan, masks: TokenMasks | None) -> StepFlags:
        """Returns whether the plan needs `draw_special` and `score`."""
        rows = plan.rows[plan.samples]
        special = masks is not None or bool(np.count_nonzero(self._special[rows]))
        return StepFlags(special, bool(np.count_nonzero(self._asking[rows])))

    def take_masks(self, masks: TokenMasks | None) -> None:
        """Uploads the masks of the next draw, in one copy."""
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
        """Samples `out` [num_rows] int32 from logits [num_rows, vocab], for rows that are not special.

        Also appends the tokens to the batch's rows.
        """
        sample_tokens(logits, out, self._state, batch_rows, seq_lens, self._batch.token_ids)

    def draw_special(self, logits: Tensor, batch_rows: Tensor, seq_lens: Tensor, out: Tensor) -> None:
        """Samples for special rows, after `draw` and, if the step has masks, `take_masks`."""
        sample_special(logits, out, self._state, batch_rows, seq_lens, self._batch.token_ids)

    def score(self, logits: Tensor, batch_rows: Tensor, tokens: Tensor) -> None:
        """Computes log-probabilities of sampled tokens [num_rows] and of their alternatives, for `logprobs`."""
        scored = self._state.scored(logits)
        score_tokens(scored, tokens, self._state, batch_rows, normalized=self._mode.is_normalized)

    def logprobs(self, plan: StepPlan, logits: Tensor, tokens: Tensor) -> PendingLogprobs:
        """Returns the results of `score` for logits and tokens of the plan's rows that sample."""
        rows = plan.rows[plan.samples]
        asking: NDArray[np.int64] = np.flatnonzero(self._asking[rows])
        sampling = [self._of(row) for row in rows[asking].tolist()]
        found, scored = self._state.found[: len(rows)], self._state.scored(logits)
        return PendingLogprobs.of(asking.tolist(), sampling, found, scored, tokens, self._mode.is_normalized)

    def _of(self, row: int) -> SamplingParams:
        params = self._params[row]
        assert params is not None, f"row {row} was never admitted"
        return params
