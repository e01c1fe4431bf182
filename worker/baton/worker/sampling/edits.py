"""Edits of logits before sampling: penalties, bias, allowed and suppressed tokens. Rows without edits cost nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.worker.core import RowInit, SamplingParams, TokenMasks
from baton.worker.sampling.noise import Float32
from baton.worker.sampling.output_rules import OutputRules, has_rules
from baton.worker.sampling.token_counts import TokenCounts

_log = logging.getLogger(__name__)

Ids = NDArray[np.int64]
Penalties = tuple[float, float, float]  # repetition, frequency, presence

_NEVER = np.float32("-inf")


@dataclass(frozen=True, slots=True)
class LogitsEdits:
    """The edits of one row. Empty arrays and None edit nothing."""

    penalties: Penalties
    counts: TokenCounts | None  # None: no penalty
    bias_ids: Ids
    biases: NDArray[np.float32]
    allowed: Ids
    suppressed: Ids
    min_tokens: int  # output tokens before which `suppressed` applies
    rules: OutputRules | None  # None: the next token does not depend on the output

    def add(self, token_id: int) -> None:
        """Counts an output token."""
        if self.counts is not None:
            self.counts.add(token_id)
        if self.rules is not None:
            self.rules.add(token_id)


def edits_of(init: RowInit, vocab_size: int) -> LogitsEdits | None:
    """Returns the edits of a request; None if there are none."""
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
        # Only the repetition penalty includes the prompt.
        counts=TokenCounts(prompt if penalties[0] != 1.0 else prompt[:0], output) if penalized else None,
        bias_ids=np.array([token_id for token_id, _ in biased], np.int64),
        biases=np.array([bias for _, bias in biased], np.float32),
        allowed=_known(sampling.allowed_token_ids, vocab_size, "allowed_token_ids"),
        suppressed=_known(sampling.suppressed_token_ids, vocab_size, "suppressed_token_ids"),
        min_tokens=sampling.min_tokens if sampling.suppressed_token_ids else 0,
        rules=OutputRules(sampling, output) if ruled else None,
    )


def apply_edits(logits: Float32, edits: Sequence[tuple[int, LogitsEdits]], num_outputs: Ids) -> None:
    """Edits logits [num_rows, vocab_size] in place. `edits` has pairs of a row of `logits` and its edits."""
    biased = [(row, edit) for row, edit in edits if edit.bias_ids.size]
    if biased:
        indices = _indices_of((row, edit.bias_ids) for row, edit in biased)
        np.add.at(logits, indices, np.concatenate([edit.biases for _, edit in biased]))
    _apply_penalties(logits, [(row, edit.penalties, edit.counts) for row, edit in edits if edit.counts is not None])
    allowed = [(row, edit.allowed) for row, edit in edits if edit.allowed.size]
    if allowed:
        indices = _indices_of(allowed)
        kept = logits[indices]
        logits[[row for row, _ in allowed]] = _NEVER
        logits[indices] = kept
    suppressed = [(row, edit.suppressed) for row, edit in edits if num_outputs[row] < edit.min_tokens]
    if suppressed:
        logits[_indices_of(suppressed)] = _NEVER
    for row, edit in edits:
        if edit.rules is not None:
            _apply_rules(logits[row], edit.rules)


def _apply_penalties(logits: Float32, rows: Sequence[tuple[int, Penalties, TokenCounts]]) -> None:
    """l / repetition if l > 0 else l * repetition, then - frequency * count - presence * [count > 0]."""
    rows = [each for each in rows if each[2].token_ids.size]
    if not rows:
        return
    sizes = [counts.token_ids.size for _, _, counts in rows]
    repetition, frequency, presence = (
        np.repeat(np.array(column, np.float32), sizes) for column in zip(*(each[1] for each in rows), strict=True)
    )
    output_counts = np.concatenate([counts.counts for _, _, counts in rows])
    indices = _indices_of((row, counts.token_ids) for row, _, counts in rows)
    seen = logits[indices]
    seen = np.where(seen > 0, seen / repetition, seen * repetition)
    seen -= frequency * output_counts + presence * (output_counts > 0)
    logits[indices] = seen


def _apply_rules(logits: Float32, rules: OutputRules) -> None:
    """Edits one row's logits [vocab_size] in place."""
    forbidden = rules.forbidden()
    if forbidden:
        logits[forbidden] = _NEVER
    forced = rules.forced()
    if forced is not None:
        logits[:] = _NEVER
        logits[forced] = 0.0


def apply_masks(logits: Float32, masks: TokenMasks) -> None:
    """Sets logits [num_rows, vocab_size] of masked tokens to -inf, in place."""
    kept = np.unpackbits(masks.bits.astype("<i4", copy=False).view(np.uint8), axis=1, bitorder="little")
    for row, each in zip(masks.indices.tolist(), kept, strict=True):
        logits[row, each[: logits.shape[1]] == 0] = _NEVER


def _indices_of(parts: Iterable[tuple[int, Ids]]) -> tuple[Ids, Ids]:
    listed = list(parts)
    rows = np.repeat([row for row, _ in listed], [ids.size for _, ids in listed])
    return rows, np.concatenate([ids for _, ids in listed])


def _suppresses(sampling: SamplingParams) -> bool:
    return sampling.min_tokens > 0 and bool(sampling.suppressed_token_ids)


def _known(token_ids: Sequence[int], vocab_size: int, field: str) -> Ids:
    ids = np.asarray(token_ids, np.int64)
    known = ids[(ids >= 0) & (ids < vocab_size)]
    if len(known) < len(ids):
        _log.warning("%s names tokens outside the vocabulary of %d; they are ignored", field, vocab_size)
    return known
