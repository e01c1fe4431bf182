"""From logits to tokens on the device. Rows with plain parameters cost three launches; the host is never waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from baton.kernels.reference.logprobs import row_logprobs, token_logprobs
from baton.kernels.sampling import SamplingColumns, sample_tokens
from baton.kernels.token_mask import apply_token_masks
from baton.worker.core import RowInit, SamplingParams, StepPlan, TokenLogprobs, TokenMasks
from baton.worker.cuda.batch import DeviceBatch
from baton.worker.cuda.output_rules import DeviceRules
from baton.worker.cuda.prompt_logprobs import to_pinned
from baton.worker.cuda.uploads import Patches
from baton.worker.executor.output_rules import has_rules

_LOW_64 = (1 << 64) - 1


@dataclass(slots=True)
class PendingLogprobs:
    """Log-probabilities on their way to the host."""

    indices: list[int]  # into the step's sampled tokens
    num_tops: list[int]
    found: list[Tensor]  # pinned: logprobs, ranks, top_token_ids, top_logprobs
    # By place in `indices`, where the request says which alternatives: those, and their log-probabilities, pinned.
    named: dict[int, tuple[tuple[int, ...], Tensor]] = field(default_factory=dict)

    def read(self) -> dict[int, TokenLogprobs]:
        """By index into the step's sampled tokens. Call when the step is done."""
        columns = zip(self.indices, self.num_tops, *(tensor.tolist() for tensor in self.found), strict=True)
        found = {
            index: TokenLogprobs(logprob, rank, tuple(top_ids[:count]), tuple(top[:count]))
            for index, count, logprob, rank, top_ids, top in columns
        }
        for place, (token_ids, values) in self.named.items():
            index = self.indices[place]
            found[index] = replace(found[index], top_token_ids=token_ids, top_logprobs=tuple(values.tolist()))
        return found


class DeviceSampler:
    """Sampling parameters of the persistent batch's rows.

    `batch_invariant`: what a row gets does not depend on which others are drawn with it, or want what.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        batch: DeviceBatch,
        device: torch.device,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._vocab_size = vocab_size
        self._batch = batch
        self._device = device
        self._invariant = batch_invariant
        self._columns = SamplingColumns(num_rows, vocab_size, device)
        self._patches = Patches(self._columns.words, self._columns.words.numel())
        self._first_words = np.array(self._columns.first_words, np.int64)
        self._word_steps = np.array(self._columns.word_steps, np.int64)
        self._params: list[SamplingParams | None] = [None] * num_rows
        self._num_prompt_tokens = np.zeros(num_rows, np.int64)
        self._special = np.zeros(num_rows, np.bool_)  # rows that edit their logits or ask for logprobs
        self._rules: dict[int, DeviceRules] = {}  # by row
        self._chosen: dict[int, Tensor] = {}  # by row: the alternatives, where the request says which

    def admit(self, inits: list[RowInit]) -> None:
        """Takes rows' parameters to the device, in one copy."""
        if not inits:
            return
        for init in inits:
            self._params[init.row] = init.sampling
            self._num_prompt_tokens[init.row] = init.num_prompt_tokens
            self._special[init.row] = init.sampling.logprobs is not None or _edits(init.sampling)
        wishes = [init.sampling for init in inits]
        fractions = np.array([(wish.temperature, wish.top_p, wish.min_p) for wish in wishes], np.float32)
        numbers = np.array(
            [(min(init.sampling.top_k, self._vocab_size), init.num_prompt_tokens) for init in inits], np.int32
        )
        seeds = np.array([wish.seed & _LOW_64 for wish in wishes], np.uint64).view(np.int32).reshape(-1, 2)
        rows = np.array([init.row for init in inits], np.int64)
        places = self._first_words + self._word_steps * rows[:, None]
        self._patches.write(places.reshape(-1), np.hstack((fractions.view(np.int32), numbers, seeds)).reshape(-1))
        self._admit_lists(inits)

    def _admit_lists(self, inits: list[RowInit]) -> None:
        """Takes what few requests have, in one copy."""
        values: list[NDArray[np.int64]] = []
        taken: list[Callable[[Tensor], None]] = []
        for init in inits:
            row, sampling = init.row, init.sampling
            self._rules.pop(row, None)
            self._chosen.pop(row, None)
            if has_rules(sampling):
                rules = self._rules[row] = DeviceRules(sampling, self._vocab_size)
                values.append(rules.values)
                taken.append(rules.place)
            if sampling.logprobs is not None and sampling.logprob_token_ids:
                values.append(np.array(sampling.logprob_token_ids, np.int64))
                taken.append(partial(self._chosen.__setitem__, row))
        if values:
            parts = self._batch.upload(np.concatenate(values)).split([len(each) for each in values])  # type: ignore[no-untyped-call]
            for take, part in zip(taken, parts, strict=True):
                take(part)

    def is_plain(self, plan: StepPlan) -> bool:
        """Whether `draw` alone serves the plan's rows."""
        return plan.masks is None and not self._special[plan.rows].any()

    def draw(self, logits: Tensor, batch_rows: Tensor, seq_lens: Tensor) -> Tensor:
        """Tokens [num_rows] int32 for logits [num_rows, vocab]; also written behind each row's last known token."""
        if self._invariant:
            logits = logits.float()  # as draw_special has them where any row edits its own
        sampled = torch.empty(logits.shape[0], dtype=torch.int32, device=self._device)
        sample_tokens(logits, sampled, self._columns, batch_rows, seq_lens, self._batch.token_ids)
        return sampled

    def draw_special(
        self, logits: Tensor, batch_rows: Tensor, seq_lens: Tensor, plan: StepPlan
    ) -> tuple[Tensor, PendingLogprobs | None]:
        """As draw, with the wishes of special rows: penalties, biases, what may or may not come, masks, logprobs.

        `logits` may be changed.
        """
        chosen = np.flatnonzero(plan.samples)
        rows = plan.rows[chosen].tolist()
        ends = (plan.num_computed_tokens + plan.num_scheduled_tokens)[chosen].tolist()
        asking = [index for index, row in enumerate(rows) if self._of(row).logprobs is not None]
        # Taken before the edits: logprobs are the model's own.
        raw = logits[self._to_device(asking)] if asking else None
        edited = logits
        for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
            if _edits(self._of(row)):
                edited = logits.float() if edited is logits else edited
                self._edit(edited[index], row, end)
        if plan.masks is not None:
            self._mask(edited, plan.masks)
        sampled = self.draw(edited, batch_rows, seq_lens)
        if raw is None:
            return sampled, None
        num_tops = [self._num_top(rows[index]) for index in asking]
        found = self._logprobs(raw, sampled[self._to_device(asking)].long(), num_tops)
        named = {
            place: (self._of(row).logprob_token_ids, to_pinned(token_logprobs(raw[place : place + 1], ids[None])[0]))
            for place, row in enumerate(rows[index] for index in asking)
            if (ids := self._chosen.get(row)) is not None
        }
        return sampled, PendingLogprobs(asking, num_tops, [to_pinned(tensor) for tensor in found], named)

    def _num_top(self, row: int) -> int:
        """How many of the most likely tokens are wanted."""
        return 0 if row in self._chosen else min(self._of(row).logprobs or 0, self._vocab_size)

    def _mask(self, logits: Tensor, masks: TokenMasks) -> None:
        """In place. Rows and bits go up in one copy through pinned memory."""
        count, num_words = masks.bits.shape
        packed = np.zeros((count, -(-(num_words + 1) // 2) * 2), np.int32)
        packed[:, 0] = masks.indices
        packed[:, 1 : 1 + num_words] = masks.bits
        up = self._batch.upload(packed.view(np.int64).reshape(-1)).view(torch.int32).view(count, -1)
        apply_token_masks(logits, up[:, 0].contiguous(), up[:, 1:])

    def _logprobs(self, logits: Tensor, token_ids: Tensor, num_tops: list[int]) -> Sequence[Tensor]:
        most = max(num_tops)
        if not self._invariant:
            return row_logprobs(logits, token_ids, most)
        # One by one: how torch cuts a sum over a row depends on how many rows there are.
        each = [row_logprobs(logits[i : i + 1], token_ids[i : i + 1], num) for i, num in enumerate(num_tops)]
        columns = zip(*each, strict=True)
        return [torch.cat([_widened(part, most) for part in column]) for column in columns]

    def _of(self, row: int) -> SamplingParams:
        params = self._params[row]
        assert params is not None, f"row {row} was never admitted"
        return params

    def _edit(self, logits: Tensor, row: int, num_tokens: int) -> None:
        """In place, for one row's fp32 logits [vocab]; num_tokens are known of it."""
        params = self._of(row)
        num_prompt = int(self._num_prompt_tokens[row])
        known = self._batch.token_ids[row, :num_tokens].long()
        if params.repetition_penalty != 1.0:
            seen = torch.zeros_like(logits, dtype=torch.bool).index_fill_(0, known, True)
            r = params.repetition_penalty
            logits.copy_(torch.where(seen, torch.where(logits > 0, logits / r, logits * r), logits))
        if params.frequency_penalty or params.presence_penalty:
            counts = torch.zeros_like(logits).index_add_(
                0, known[num_prompt:], torch.ones(num_tokens - num_prompt, device=self._device)
            )
            logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        if params.logit_bias:
            ids = self._known([token_id for token_id, _ in params.logit_bias])
            biases = [bias for token_id, bias in params.logit_bias if token_id < self._vocab_size]
            logits.index_add_(0, ids, torch.tensor(biases, dtype=torch.float32).to(self._device, non_blocking=True))
        if params.allowed_token_ids:
            ids = self._known(params.allowed_token_ids)
            kept = logits[ids]
            logits.fill_(float("-inf")).index_copy_(0, ids, kept)
        if num_tokens - num_prompt < params.min_tokens and params.suppressed_token_ids:
            logits.index_fill_(0, self._known(params.suppressed_token_ids), float("-inf"))
        rules = self._rules.get(row)
        if rules is not None:
            rules.apply(logits, self._batch.token_ids[row, num_prompt:num_tokens])

    def _known(self, token_ids: list[int] | tuple[int, ...]) -> Tensor:
        return self._to_device([token_id for token_id in token_ids if token_id < self._vocab_size])

    def _to_device(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)


def _edits(params: SamplingParams) -> bool:
    """Whether the request changes its logits before a token is drawn."""
    return bool(
        params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or params.logit_bias
        or params.allowed_token_ids
        or (params.min_tokens and params.suppressed_token_ids)
        or has_rules(params)
    )


def _widened(part: Tensor, width: int) -> Tensor:
    """Rows of alternatives, to as many as the row with the most has."""
    return part if part.dim() == 1 else functional.pad(part, (0, width - part.shape[1]))
