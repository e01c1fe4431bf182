"""Converts sampling parameters of requests to the device's columns and lists. Host only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.kernels.sampling import columns
from baton.worker.core import Int32, RowInit, SamplingParams
from baton.worker.sampling.output_rules import has_rules
from baton.worker.sampling.penalties import is_penalized
from baton.worker.sampling.sampler import drawn_temperature

_LOW_64 = (1 << 64) - 1
_ANY = -1  # padding before a sequence's first token
_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class RowLists:
    """The parameters of one request that have no fixed length."""

    words: Int32  # biased tokens, biases, bitmaps of allowed and suppressed tokens, sequences, end of reasoning, named
    flags: int  # their bits of columns.FLAGS
    num_biases: int = 0
    num_sequences: int = 0
    sequence_width: int = 0  # tokens of the longest, without the last
    num_named: int = 0


_NO_LISTS = RowLists(_NONE, 0)


def row_lists(sampling: SamplingParams, vocab_size: int) -> RowLists:
    """Returns the lists of a request, without tokens outside the vocabulary."""
    if not (
        sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.suppressed_token_ids
        or sampling.logprob_token_ids
        or has_rules(sampling)
    ):
        return _NO_LISTS
    biases = [(token_id, bias) for token_id, bias in sampling.logit_bias if 0 <= token_id < vocab_size]
    allowed = _known(sampling.allowed_token_ids, vocab_size)
    suppressed = _known(sampling.suppressed_token_ids if sampling.min_tokens else (), vocab_size)
    sequences = [each for each in sampling.forbidden_sequences if max(each) < vocab_size]
    width = max((len(each) - 1 for each in sequences), default=0)
    limit = sampling.reasoning_limit
    named = sampling.logprob_token_ids if sampling.logprobs is not None else ()
    words = [
        np.array([token_id for token_id, _ in biases], np.int32),
        np.array([bias for _, bias in biases], np.float32).view(np.int32),
        _bitmap(allowed, vocab_size),
        _bitmap(suppressed, vocab_size),
        _prefixes(sequences, width),
        np.array([each[-1] for each in sequences], np.int32),
        np.array(() if limit is None else limit.end_token_ids, np.int32),
        np.array(named, np.int32),
    ]
    flags = (
        (columns.BIASED.value if biases else 0)
        | (columns.ALLOWED.value if len(allowed) else 0)
        | (columns.SUPPRESSED.value if len(suppressed) else 0)
        | (columns.RULED.value if sequences or limit is not None else 0)
    )
    return RowLists(np.concatenate(words), flags, len(biases), len(sequences), width, len(named))


def flags_of(sampling: SamplingParams, lists: RowLists, keeps_processed: bool = False) -> int:
    """Returns the bits of columns.FLAGS. `keeps_processed`: log-probabilities are of the logits that are drawn from."""
    flags = lists.flags
    if keeps_processed and sampling.logprobs is not None:
        flags |= columns.KEPT.value
    if is_penalized(sampling):
        flags |= columns.PENALIZED.value
    filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    if flags or sampling.extra_args or (filtered and drawn_temperature(sampling) > 0):
        flags |= columns.SPECIAL.value
    return flags


def column_words(
    inits: Sequence[RowInit],
    lists: Sequence[RowLists],
    addresses: Sequence[int],
    vocab_size: int,
    keeps_processed: bool = False,
) -> Int32:
    """Returns the words of all columns, [len(inits), NUM_COLUMNS]. `addresses` of the rows' lists are on the device."""
    words = np.empty((len(inits), columns.NUM_COLUMNS), np.int32)
    words[:, :6].view(np.float32)[:] = [
        (
            drawn_temperature(sampling),
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        for sampling in (init.sampling for init in inits)
    ]
    words[:, 6:8] = [(_top_k(init.sampling, vocab_size), init.num_prompt_tokens) for init in inits]
    words[:, 8:10] = _halves([init.sampling.seed & _LOW_64 for init in inits])
    words[:, 12:14] = _halves(addresses)
    flags = [flags_of(init.sampling, each, keeps_processed) for init, each in zip(inits, lists, strict=True)]
    words[:, 10] = flags
    rest = [_rest(init.sampling, each, vocab_size) for init, each in zip(inits, lists, strict=True)]
    words[:, [11, *range(14, columns.NUM_COLUMNS)]] = rest
    return words


def _rest(sampling: SamplingParams, lists: RowLists, vocab_size: int) -> tuple[int, ...]:
    """Returns min_tokens, and the columns after the lists' address."""
    limit = sampling.reasoning_limit
    start = None if limit is None else limit.start_token_id
    num_logprobs = -1 if sampling.logprobs is None else num_likely(sampling, vocab_size)
    return (
        sampling.min_tokens,
        lists.num_biases,
        lists.num_sequences,
        lists.sequence_width,
        0 if limit is None else limit.max_tokens,
        -1 if start is None else start,
        0 if limit is None else len(limit.end_token_ids),
        num_logprobs,
        lists.num_named,
    )


def num_likely(sampling: SamplingParams, vocab_size: int) -> int:
    """Returns the number of most likely tokens that a request asks for."""
    return 0 if sampling.logprob_token_ids else min(sampling.logprobs or 0, vocab_size)


def _top_k(sampling: SamplingParams, vocab_size: int) -> int:
    """Returns top_k, or 0 if it excludes nothing."""
    return sampling.top_k if sampling.top_k < vocab_size else 0


def _halves(values: Sequence[int]) -> Int32:
    """Returns the low and the high 32 bits, [len(values), 2]."""
    return np.array(values, np.uint64).view(np.int32).reshape(-1, 2)


def _known(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    ids = np.array(token_ids, np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]


def _bitmap(token_ids: NDArray[np.int64], vocab_size: int) -> Int32:
    """Returns a bitmap with bit t % 32 of word t // 32 set for each token t; empty without tokens."""
    if not len(token_ids):
        return _NONE
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[token_ids] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def _prefixes(sequences: Sequence[tuple[int, ...]], width: int) -> Int32:
    """Returns all tokens but the last of each sequence, right-aligned, [len(sequences) * width]."""
    prefixes = np.full((len(sequences), width), _ANY, np.int32)
    for index, each in enumerate(sequences):
        prefixes[index, width - len(each) + 1 :] = each[:-1]
    return prefixes.reshape(-1)
