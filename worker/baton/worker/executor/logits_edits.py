"""What some requests do to their logits before a token is drawn. Rows without wishes are not here, and cost nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.reference.logits import add_bias, allow_only, apply_penalties, force, suppress
from baton.kernels.reference.token_mask import apply_token_masks
from baton.worker.core import RowInit, SamplingParams, TokenMasks
from baton.worker.executor.output_rules import OutputRules, has_rules
from baton.worker.executor.token_counts import TokenCounts

_log = logging.getLogger(__name__)

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogitsEdits:
    """One row's wishes. Empty arrays and None are no wish."""

    penalties: tuple[float, float, float]  # repetition, frequency, presence
    counts: TokenCounts | None  # None: no penalty
    bias_ids: Ids
    biases: NDArray[np.float32]
    allowed: Ids
    suppressed: Ids
    min_tokens: int  # output tokens below which `suppressed` holds
    rules: OutputRules | None  # None: the output so far says nothing of the next token

    def add(self, token_id: int) -> None:
        """One more output token."""
        if self.counts is not None:
            self.counts.add(token_id)
        if self.rules is not None:
            self.rules.add(token_id)


def edits_of(init: RowInit, vocab_size: int) -> LogitsEdits | None:
    """None for a request that wants its logits as they are."""
    sampling = init.sampling
    penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    penalized = penalties != (1.0, 0.0, 0.0)
    ruled = has_rules(sampling)
    if not (penalized or ruled or sampling.logit_bias or sampling.allowed_token_ids or _suppresses(sampling)):
        return None
    biased = [(token_id, bias) for token_id, bias in sampling.logit_bias if 0 <= token_id < vocab_size]
    prompt, output = init.token_ids[: init.num_prompt_tokens], init.token_ids[init.num_prompt_tokens :].tolist()
    if len(biased) < len(sampling.logit_bias):
        _log.warning("logit_bias names tokens outside the vocabulary of %d; they are ignored", vocab_size)
    return LogitsEdits(
        penalties=penalties,
        # The prompt counts for the repetition penalty alone.
        counts=TokenCounts(prompt if penalties[0] != 1.0 else prompt[:0], output) if penalized else None,
        bias_ids=np.array([token_id for token_id, _ in biased], np.int64),
        biases=np.array([bias for _, bias in biased], np.float32),
        allowed=_known(sampling.allowed_token_ids, vocab_size, "allowed_token_ids"),
        suppressed=_known(sampling.suppressed_token_ids, vocab_size, "suppressed_token_ids"),
        min_tokens=sampling.min_tokens if sampling.suppressed_token_ids else 0,
        rules=OutputRules(sampling, output) if ruled else None,
    )


def apply_edits(logits: Tensor, edits: Sequence[tuple[int, LogitsEdits]], num_outputs: NDArray[np.int64]) -> None:
    """In place, for fp32 logits [num_rows, vocab_size]; edits are of (row of logits, wishes)."""
    biased = [(row, edit) for row, edit in edits if edit.bias_ids.size]
    if biased:
        rows, token_ids = _columns((row, edit.bias_ids) for row, edit in biased)
        add_bias(logits, rows, token_ids, torch.from_numpy(np.concatenate([edit.biases for _, edit in biased])))
    penalized = [
        (row, edit, edit.counts) for row, edit in edits if edit.counts is not None and edit.counts.token_ids.size
    ]
    if penalized:
        rows, token_ids = _columns((row, counts.token_ids) for row, _, counts in penalized)
        factors = np.array([edit.penalties for _, edit, _ in penalized], np.float32)
        columns = torch.from_numpy(np.repeat(factors, [counts.token_ids.size for _, _, counts in penalized], axis=0))
        output_counts = torch.from_numpy(np.concatenate([counts.counts for _, _, counts in penalized]))
        apply_penalties(logits, rows, token_ids, output_counts, *columns.unbind(1))
    allowed = [(row, edit.allowed) for row, edit in edits if edit.allowed.size]
    if allowed:
        allow_only(logits, *_columns(allowed))
    suppressed = [(row, edit.suppressed) for row, edit in edits if num_outputs[row] < edit.min_tokens]
    if suppressed:
        suppress(logits, *_columns(suppressed))
    _apply_rules(logits, [(row, edit.rules) for row, edit in edits if edit.rules is not None])


def _apply_rules(logits: Tensor, rules: Sequence[tuple[int, OutputRules]]) -> None:
    forbidden = [(row, np.array(ids, np.int64)) for row, rule in rules if (ids := rule.forbidden())]
    if forbidden:
        suppress(logits, *_columns(forbidden))
    forced = [(row, np.array([token_id], np.int64)) for row, rule in rules if (token_id := rule.forced()) is not None]
    if forced:
        force(logits, *_columns(forced))


def apply_masks(logits: Tensor, masks: TokenMasks) -> None:
    """In place, for logits [num_rows, vocab_size]: what a mask forbids becomes -inf."""
    apply_token_masks(logits, torch.from_numpy(masks.indices), torch.from_numpy(masks.bits))


def _columns(parts: Iterable[tuple[int, Ids]]) -> tuple[Tensor, Tensor]:
    listed = list(parts)
    rows = np.repeat([row for row, _ in listed], [ids.size for _, ids in listed])
    return torch.from_numpy(rows), torch.from_numpy(np.concatenate([ids for _, ids in listed]))


def _suppresses(sampling: SamplingParams) -> bool:
    return sampling.min_tokens > 0 and bool(sampling.suppressed_token_ids)


def _known(token_ids: Sequence[int], vocab_size: int, what: str) -> Ids:
    ids = np.asarray(token_ids, np.int64)
    known = ids[(ids >= 0) & (ids < vocab_size)]
    if len(known) < len(ids):
        _log.warning("%s names tokens outside the vocabulary of %d; they are ignored", what, vocab_size)
    return known
