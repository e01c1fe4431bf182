"""Sampling of the simulated device: maps 64 random bits of a row to a token, by the row's sampling parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from baton.worker.core import Int32, Int64, RowInit, SamplingParams, StepPlan, TokenLogprobs, TokenMasks
from baton.worker.executors.sim.kv import UInt64, mix
from baton.worker.sampling.output_rules import OutputRules, has_rules


class SimDraws:
    """The sampling parameters of the batch's rows, without penalties and logit_bias."""

    def __init__(
        self, num_rows: int, vocab_size: int, first_token_id: int, eos_token_ids: tuple[int, ...], eos_every: int
    ) -> None:
        every = np.arange(first_token_id, vocab_size, dtype=np.int32)
        self._ordinary = every[~np.isin(every, eos_token_ids)]
        self._eos_token_ids = eos_token_ids
        self._eos_every = eos_every
        self._noise = np.zeros(num_rows, np.uint64)  # 0: greedy
        self._num_prompt_tokens = np.zeros(num_rows, np.int64)
        self._special: dict[int, SamplingParams] = {}  # of rows that need more than the columns
        self._rules: dict[int, OutputRules] = {}  # by row
        self._num_prompt_top: dict[int, int] = {}  # alternatives by row, for rows that ask for prompt log-probabilities

    def admit(self, row: int, init: RowInit) -> None:
        """Stores a row's parameters."""
        self.free(row)
        sampling = init.sampling
        seed = np.array([sampling.seed & 0xFFFFFFFFFFFFFFFF], np.uint64)
        self._noise[row] = (mix(seed + np.uint64(1)) | np.uint64(1))[0] if sampling.temperature > 0 else 0
        self._num_prompt_tokens[row] = init.num_prompt_tokens
        ruled = has_rules(sampling)
        if sampling.allowed_token_ids or sampling.suppressed_token_ids or sampling.logprobs is not None or ruled:
            self._special[row] = sampling
        if ruled:
            self._rules[row] = OutputRules(sampling, init.token_ids[init.num_prompt_tokens :].tolist())
        if sampling.prompt_logprobs is not None:
            self._num_prompt_top[row] = sampling.prompt_logprobs

    def free(self, row: int) -> None:
        """Drops a row. It may be empty."""
        self._special.pop(row, None)
        self._rules.pop(row, None)
        self._num_prompt_top.pop(row, None)

    def count(self, row: int, token_id: int) -> None:
        """Counts an output token of a row."""
        if row in self._rules:
            self._rules[row].add(token_id)

    def draw(
        self, rows: Int64, positions: Int64, bits: UInt64, masks: TokenMasks | None = None
    ) -> tuple[Int32, dict[int, TokenLogprobs]]:
        """Returns the token at each row's position. Greedy rows ignore their seed."""
        noise = self._noise[rows]
        bits = np.where(noise == 0, bits, mix(bits ^ mix(noise + positions.astype(np.uint64))))
        token_ids = self._ordinary[(bits % np.uint64(len(self._ordinary))).astype(np.int64)]
        if self._eos_every and self._eos_token_ids:
            ends = mix(bits) % np.uint64(self._eos_every) == 0
            token_ids = np.where(ends, np.int32(self._eos_token_ids[0]), token_ids)
        logprobs: dict[int, TokenLogprobs] = {}
        if self._special:
            self._draw_special(rows, positions, bits, token_ids, logprobs)
        if masks is not None:
            self._draw_masked(rows, bits, masks, token_ids, logprobs)
        if self._rules:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                self.count(row, token_id)
        return token_ids, logprobs

    def prompt_logprobs(
        self, plan: StepPlan, prompts: Mapping[int, UInt64] | Sequence[UInt64]
    ) -> dict[int, tuple[int, list[TokenLogprobs]]]:
        """Returns the log-probabilities of the step's prompt tokens, and the place of the first, by index in the plan.

        `prompts` are the rows' prompts.
        """
        found: dict[int, tuple[int, list[TokenLogprobs]]] = {}
        if not self._num_prompt_top:
            return found
        for index, row in enumerate(plan.rows.tolist()):
            start, count = int(plan.num_computed_tokens[index]), int(plan.num_scheduled_tokens[index])
            entries = self._logprobs_of_prompt(row, prompts[row], start + 1, start + count + 1)
            if entries:
                found[index] = (start + 1, entries)
        return found

    def _logprobs_of_prompt(self, row: int, token_ids: UInt64, first: int, stop: int) -> list[TokenLogprobs]:
        """Returns those of tokens `first` to `stop` if the row asks for them, by token and position."""
        num_top = self._num_prompt_top.get(row)
        stop = min(stop, int(self._num_prompt_tokens[row]))
        if num_top is None or stop <= first:
            return []
        bits = mix(token_ids[first:stop] + mix(np.arange(first, stop, dtype=np.uint64)))
        return [
            _logprobs(self._filled([token_id], self._ordinary, 1 + num_top, each), num_top, each)
            for token_id, each in zip(token_ids[first:stop].tolist(), bits.tolist(), strict=True)
        ]

    def _draw_masked(
        self, rows: Int64, bits: UInt64, masks: TokenMasks, token_ids: Int32, logprobs: dict[int, TokenLogprobs]
    ) -> None:
        """Samples the masked rows. Masks contain all restrictions of a request, except those by its output."""
        for index, mask in zip(masks.indices.tolist(), masks.bits, strict=True):
            row = int(rows[index])
            sampling, rules = self._special.get(row), self._rules.get(row)
            forced = None if rules is None else rules.forced()
            if forced is not None:
                choices = [forced]
            else:
                wanted = 1 if sampling is None or sampling.logprobs is None else 1 + sampling.logprobs
                choices = _choices_of_mask(_without(mask, rules), int(bits[index]), wanted) or [0]
            token_ids[index] = choices[0]
            if sampling is not None and sampling.logprobs is not None:
                logprobs[index] = self._alternatives(choices, sampling, int(bits[index]))

    def _draw_special(
        self, rows: Int64, positions: Int64, bits: UInt64, token_ids: Int32, logprobs: dict[int, TokenLogprobs]
    ) -> None:
        for index, row in enumerate(rows.tolist()):
            sampling = self._special.get(row)
            if sampling is None:
                continue
            num_output_tokens = int(positions[index] - self._num_prompt_tokens[row])
            suppressed = sampling.suppressed_token_ids if num_output_tokens < sampling.min_tokens else ()
            choices = self._choices(sampling, row, suppressed, int(token_ids[index]), int(bits[index]))
            token_ids[index] = choices[0]
            if sampling.logprobs is not None:
                logprobs[index] = self._alternatives(choices, sampling, int(bits[index]))

    def _choices(
        self, sampling: SamplingParams, row: int, suppressed: Sequence[int], drawn: int, bits: int
    ) -> list[int]:
        """Returns the drawn token, or a replacement if it is suppressed, followed by alternatives."""
        rules = self._rules.get(row)
        if rules is not None:
            forced = rules.forced()
            if forced is not None:
                return [forced]
            suppressed = (*suppressed, *rules.forbidden())
        wanted = 1 + (sampling.logprobs or 0)
        table = sampling.allowed_token_ids or self._ordinary
        choices = [] if sampling.allowed_token_ids or drawn in suppressed else [drawn]
        return self._filled(choices, table, wanted, bits, suppressed) or [drawn]

    def _filled(
        self, choices: list[int], table: Sequence[int] | Int32, wanted: int, bits: int, without: Collection[int] = ()
    ) -> list[int]:
        """Appends tokens of the table to `choices`, up to `wanted`."""
        for offset in range(len(table)):
            if len(choices) >= wanted:
                break
            candidate = int(table[(bits + offset) % len(table)])
            if candidate not in without and candidate not in choices:
                choices.append(candidate)
        return choices

    def _alternatives(self, choices: list[int], sampling: SamplingParams, bits: int) -> TokenLogprobs:
        """Returns log-probabilities of the drawn token and of the requested alternatives."""
        found = _logprobs(choices, sampling.logprobs or 0, bits)
        if not sampling.logprob_token_ids:
            return found
        values = tuple(
            found.logprob if token_id == choices[0] else found.logprob - 0.7 - token_id % 97
            for token_id in sampling.logprob_token_ids
        )
        return TokenLogprobs(found.logprob, found.rank, sampling.logprob_token_ids, values)


def _without(mask: Int32, rules: OutputRules | None) -> Int32:
    """Returns the mask without tokens that the output forbids."""
    forbidden = rules.forbidden() if rules is not None else ()
    if not forbidden:
        return mask
    mask = mask.copy()
    for token_id in forbidden:
        mask[token_id // 32] &= ~np.array(1 << token_id % 32, np.uint32).view(np.int32)
    return mask


def _choices_of_mask(mask: Int32, bits: int, wanted: int) -> list[int]:
    """Returns up to `wanted` tokens of the mask; `bits` select the first."""
    words = np.flatnonzero(mask)
    chosen: list[int] = []
    for offset in range(len(words)):
        word = int(words[(bits + offset) % len(words)])
        allowed = int(mask[word]) & 0xFFFFFFFF
        for index in range(min(allowed.bit_count(), wanted - len(chosen))):
            bit = _nth_bit(allowed, (bits >> 32) + index)
            chosen.append(word * 32 + bit)
        if len(chosen) >= wanted:
            break
    return chosen


def _nth_bit(word: int, number: int) -> int:
    """Returns the position of the set bit `number`, modulo their count."""
    for _ in range(number % word.bit_count()):
        word &= word - 1
    return (word & -word).bit_length() - 1


def _logprobs(choices: list[int], num_alternatives: int, bits: int) -> TokenLogprobs:
    """Returns deterministic log-probabilities: the drawn token is the most likely, each next one about half as much."""
    first = -0.05 - (bits >> 40) % 1000 / 2000
    tops = choices[:num_alternatives]
    return TokenLogprobs(first, 1, tuple(tops), tuple(first - 0.7 * (i + 1) * (i > 0) for i in range(len(tops))))
