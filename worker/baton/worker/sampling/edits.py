"""Edits of logits before sampling: bias, penalties, allowed and suppressed tokens. Rows without edits cost nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from baton.worker.core import Int64, RowInit, SamplingParams, TokenMasks
from baton.worker.sampling.noise import Float32
from baton.worker.sampling.output_rules import OutputRules, has_rules
from baton.worker.sampling.penalties import Penalties

_log = logging.getLogger(__name__)

_NEVER = np.float32("-inf")


class LogitsEdits:
    """The edits of the batch's rows."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._penalties = Penalties(num_rows)
        self._by_row: dict[int, _RowEdits] = {}

    def admit(self, init: RowInit) -> None:
        """Stores a row's edits, and its tokens if they depend on them."""
        self._penalties.admit(init)
        edits = _edits_of(init, self._vocab_size)
        if edits is None:
            self._by_row.pop(init.row, None)
        else:
            self._by_row[init.row] = edits

    def free(self, row: int) -> None:
        self._penalties.free(row)
        self._by_row.pop(row, None)

    def apply(self, logits: Float32, rows: Int64, num_outputs: Int64) -> None:
        """Edits logits [len(rows), vocab_size] in place, after num_outputs tokens of each row."""
        edits = self._edits_at(rows)
        biased = [(index, edit) for index, edit in edits if edit.bias_ids.size]
        if biased:
            indices = _indices_of((index, edit.bias_ids) for index, edit in biased)
            np.add.at(logits, indices, np.concatenate([edit.biases for _, edit in biased]))
        penalized = self._penalties.of(rows)
        if penalized.size:
            self._penalties.apply(logits, penalized, rows[penalized])
        if edits:
            _restrict(logits, edits, num_outputs)

    def add(self, rows: Int64, token_ids: Int64) -> None:
        """Counts an output token of each row."""
        penalized = self._penalties.of(rows)
        if penalized.size:
            self._penalties.add(rows[penalized], token_ids[penalized])
        for index, edit in self._edits_at(rows):
            if edit.rules is not None:
                edit.rules.add(int(token_ids[index]))

    def _edits_at(self, rows: Int64) -> list[tuple[int, _RowEdits]]:
        if not self._by_row:
            return []
        return [(index, self._by_row[row]) for index, row in enumerate(rows.tolist()) if row in self._by_row]


@dataclass(frozen=True, slots=True)
class _RowEdits:
    """The edits of one row, except penalties. Empty arrays and None edit nothing."""

    bias_ids: Int64
    biases: Float32
    allowed: Int64
    suppressed: Int64
    min_tokens: int  # output tokens before which `suppressed` applies
    rules: OutputRules | None  # None: the next token does not depend on the output


def _edits_of(init: RowInit, vocab_size: int) -> _RowEdits | None:
    """Returns the edits of a request; None if there are none but penalties."""
    sampling = init.sampling
    ruled = has_rules(sampling)
    if not (ruled or sampling.logit_bias or sampling.allowed_token_ids or _suppresses(sampling)):
        return None
    biased = [(token_id, bias) for token_id, bias in sampling.logit_bias if 0 <= token_id < vocab_size]
    if len(biased) < len(sampling.logit_bias):
        _log.warning("logit_bias names tokens outside the vocabulary of %d; they are ignored", vocab_size)
    return _RowEdits(
        bias_ids=np.array([token_id for token_id, _ in biased], np.int64),
        biases=np.array([bias for _, bias in biased], np.float32),
        allowed=_known(sampling.allowed_token_ids, vocab_size, "allowed_token_ids"),
        suppressed=_known(sampling.suppressed_token_ids, vocab_size, "suppressed_token_ids"),
        min_tokens=sampling.min_tokens if sampling.suppressed_token_ids else 0,
        rules=OutputRules(sampling, init.token_ids[init.num_prompt_tokens :].tolist()) if ruled else None,
    )


def _restrict(logits: Float32, edits: Sequence[tuple[int, _RowEdits]], num_outputs: Int64) -> None:
    """Applies allowed and suppressed tokens, and rules, to logits [num_rows, vocab_size] in place."""
    allowed = [(index, edit.allowed) for index, edit in edits if edit.allowed.size]
    if allowed:
        indices = _indices_of(allowed)
        kept = logits[indices]
        logits[[index for index, _ in allowed]] = _NEVER
        logits[indices] = kept
    suppressed = [(index, edit.suppressed) for index, edit in edits if num_outputs[index] < edit.min_tokens]
    if suppressed:
        logits[_indices_of(suppressed)] = _NEVER
    for index, edit in edits:
        if edit.rules is not None:
            _apply_rules(logits[index], edit.rules)


def _apply_rules(logits: Float32, rules: OutputRules) -> None:
    """Edits one row's logits [vocab_size] in place."""
    forbidden = rules.forbidden()
    if forbidden:
        logits[forbidden] = _NEVER
    forced = rules.forced()
    if forced is not None:
        kept = logits[forced]
        logits[:] = _NEVER
        logits[forced] = kept if np.isfinite(kept) else 0.0  # another rule may exclude it


def apply_masks(logits: Float32, masks: TokenMasks) -> None:
    """Sets logits [num_rows, vocab_size] of masked tokens to -inf, in place."""
    kept = np.unpackbits(masks.bits.astype("<i4", copy=False).view(np.uint8), axis=1, bitorder="little")
    for row, each in zip(masks.indices.tolist(), kept, strict=True):
        logits[row, each[: logits.shape[1]] == 0] = _NEVER


def _indices_of(parts: Iterable[tuple[int, Int64]]) -> tuple[Int64, Int64]:
    listed = list(parts)
    rows = np.repeat([row for row, _ in listed], [ids.size for _, ids in listed])
    return rows, np.concatenate([ids for _, ids in listed])


def _suppresses(sampling: SamplingParams) -> bool:
    return sampling.min_tokens > 0 and bool(sampling.suppressed_token_ids)


def _known(token_ids: Sequence[int], vocab_size: int, field: str) -> Int64:
    ids = np.asarray(token_ids, np.int64)
    known = ids[(ids >= 0) & (ids < vocab_size)]
    if len(known) < len(ids):
        _log.warning("%s names tokens outside the vocabulary of %d; they are ignored", field, vocab_size)
    return known
