"""The generate head on the host: log-probabilities of prompts, and tokens for each row that samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.rpc.errors import ServiceError
from baton.worker.adapters.head import HeadAdapters, NoHeadAdapters
from baton.worker.core import Int32, Int64, StepPlan, StepResult, TokenLogprobs, TokenMasks
from baton.worker.executors.cpu.masked_rows import MaskedRows
from baton.worker.executors.cpu.prompt_logprobs import PromptEntries, PromptLogprobs
from baton.worker.executors.cpu.rows import Rows
from baton.worker.layers.cpu.step import StepInputs
from baton.worker.models.config import ModelConfig
from baton.worker.models.model import Model
from baton.worker.sampling.logprobs_mode import LogprobsMode
from baton.worker.sampling.processors.processor_set import NO_PROCESSORS, ProcessorSet, RowTokens
from baton.worker.sampling.sampler import Sampler

_NO_ADAPTERS = NoHeadAdapters()


class Undrawn(NamedTuple):
    """A step that is not sampled yet."""

    logits: Tensor | None  # of the rows that sample; None without such rows
    prompt_logprobs: dict[int, PromptEntries]


class Changed(NamedTuple):
    """What the processors of some rows did."""

    logits: Tensor | None  # None: no row has a processor
    failed: dict[int, ServiceError]  # by index into the rows


class _Sampling:
    """The tokens of a step's rows that sample, as they are drawn."""

    def __init__(self, plan: StepPlan, logits: Tensor) -> None:
        self.picked = np.flatnonzero(plan.samples)  # indices into the plan's rows
        self.rows: Int64 = plan.rows[self.picked].astype(np.int64)
        widths = plan.num_scheduled_tokens.astype(np.int64)
        widths[plan.num_decodes :] = 1
        self.widths: Int64 = widths[self.picked]  # tokens that each may get
        self.failed: dict[int, ServiceError] = {}  # by index into `rows`
        self._logits = logits  # [sum of widths, vocab_size]
        self._starts = np.cumsum(self.widths) - self.widths
        self._token_ids: list[list[int]] = [[] for _ in self.picked]
        self._logprobs: list[dict[int, TokenLogprobs]] = [{} for _ in self.picked]  # by the row's token

    def logits_at(self, drawn: Int64, place: int) -> Tensor:
        """Returns the logits of these rows' token `place`. The sampler may write to them."""
        if len(drawn) == len(self._logits):
            return self._logits
        return self._logits.index_select(0, torch.from_numpy(self._starts[drawn] + place))

    def add(self, drawn: Int64, token_ids: Int64, logprobs: Mapping[int, TokenLogprobs]) -> None:
        """Appends a token to each of these rows."""
        for index, entry in logprobs.items():
            which = int(drawn[index])
            self._logprobs[which][len(self._token_ids[which])] = entry
        for which, token_id in zip(drawn.tolist(), token_ids.tolist(), strict=True):
            self._token_ids[which].append(token_id)

    def last_token(self, which: int) -> int:
        """Returns the token that a row got last."""
        return self._token_ids[which][-1]

    def fill(self, result: StepResult) -> None:
        """Writes the tokens to the result, row after row."""
        counts = np.array([len(each) for each in self._token_ids], np.int32)
        result.counts[self.picked] = counts
        result.token_ids = np.fromiter(chain.from_iterable(self._token_ids), np.int32, int(counts.sum()))
        result.failed = {int(self.picked[index]): error for index, error in self.failed.items()}
        starts = (np.cumsum(counts) - counts).tolist()
        for start, entries in zip(starts, self._logprobs, strict=True):
            for place, entry in entries.items():
                result.logprobs[start + place] = entry


class GenerateHead:
    """Implements Head. Appends sampled tokens to the batch's rows."""

    def __init__(
        self,
        rows: Rows,
        num_rows: int,
        config: ModelConfig,
        processors: ProcessorSet = NO_PROCESSORS,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        adapters: HeadAdapters = _NO_ADAPTERS,
    ) -> None:
        self._rows = rows
        self._adapters = adapters
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
        def of_row(states: Tensor, row: int) -> Tensor:
            return self._logits(decoder, states, np.full(len(states), row))

        scored = self._prompt_logprobs.of(plan, hidden, of_row)
        if not plan.samples.any():
            return Undrawn(None, scored)
        rows = np.repeat(plan.rows, plan.num_scheduled_tokens).astype(np.int64)
        if not plan.samples.all() or plan.num_decodes != len(plan.rows):
            last = np.cumsum(plan.num_scheduled_tokens, dtype=np.int64) - 1
            num_decoded = int(plan.num_scheduled_tokens[: plan.num_decodes].sum())
            prompts = last[plan.num_decodes :][plan.samples[plan.num_decodes :]]
            chosen = np.concatenate((np.arange(num_decoded), prompts))
            hidden, rows = hidden.index_select(0, torch.from_numpy(chosen)), rows[chosen]
        return Undrawn(self._logits(decoder, hidden, rows), scored)

    def _logits(self, decoder: Model[StepInputs], hidden: Tensor, rows: Int64) -> Tensor:
        """Returns the logits of states of these rows."""
        with self._adapters.head_used(rows):
            return decoder.logits(hidden)

    def finish(self, plan: StepPlan, undrawn: Undrawn, masks: TokenMasks | None, left_out: Int32) -> StepResult:
        result = StepResult(plan.step, np.empty(0, np.int32), np.zeros(len(plan.rows), np.int32))
        result.prompt_logprobs = undrawn.prompt_logprobs
        if undrawn.logits is None:
            return result
        sampling = _Sampling(plan, undrawn.logits)
        drawn = np.setdiff1d(np.arange(len(sampling.rows)), left_out)
        place = 0
        # Each round draws one token of each row, as a step of its own would: the next one only if the draft was right.
        masked = MaskedRows(masks)
        while len(drawn):
            if masks is not None:
                masks = masks.among(np.isin(np.arange(len(sampling.rows)), drawn))
            logits = sampling.logits_at(drawn, place)
            drawn, right = self._draw(sampling, logits, drawn, place, masks)
            drawn, masks = masked.behind(drawn[right], sampling.last_token)
            place += 1
        sampling.fill(result)
        return result

    def _draw(
        self, sampling: _Sampling, logits: Tensor, drawn: Int64, place: int, masks: TokenMasks | None
    ) -> tuple[Int64, NDArray[np.bool_]]:
        """Draws a token of each of these rows. Returns those that got one, and which of them may draw another."""
        rows = sampling.rows[drawn]
        changed = self._changed(logits, rows)
        edited: Tensor | None = changed.logits
        if changed.failed:
            sampling.failed |= {int(drawn[index]): error for index, error in changed.failed.items()}
            kept = np.ones(len(drawn), np.bool_)
            kept[[*changed.failed]] = False
            chosen = torch.from_numpy(kept)
            drawn, rows, logits, edited = (
                drawn[kept],
                rows[kept],
                logits[chosen],
                None if edited is None else edited[chosen],
            )
            if masks is not None:
                masks = masks.among(kept)
        if not len(rows):
            return drawn, np.empty(0, np.bool_)
        num_outputs = self._rows.num_tokens[rows] - self._rows.num_prompt_tokens[rows]
        token_ids, logprobs = self._sampler.sample(logits, rows, num_outputs, masks, edited)
        guessed = self._rows.token_ids[rows, self._rows.num_tokens[rows]]  # read before it is overwritten
        self._rows.append(rows, token_ids)
        sampling.add(drawn, token_ids, logprobs)
        return drawn, (guessed == token_ids) & (place + 1 < sampling.widths[drawn])

    def _changed(self, logits: Tensor, rows: Int64) -> Changed:
        """Applies the processors of these rows to a copy of the logits."""
        indices = self._processors.among(rows.tolist())
        if not indices:
            return Changed(None, {})
        known, changed = self._rows, logits.float().clone()

        def token_ids(some: Sequence[int]) -> Tensor:
            own = rows[some]
            return torch.from_numpy(known.token_ids[own, : known.num_tokens[own].max()])

        prompts, ends = known.num_prompt_tokens[rows].tolist(), known.num_tokens[rows].tolist()
        tokens = RowTokens(prompts, ends, token_ids, torch.tensor)
        return Changed(changed, self._processors.apply(changed, rows.tolist(), indices, tokens))
