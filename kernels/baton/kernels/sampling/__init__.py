"""Samples tokens on the device. A row's result depends only on its own logits, parameters and tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from baton.kernels.overlap import overlaps
from baton.kernels.sampling.collect import _collect_kernel
from baton.kernels.sampling.cuts import _guess_kernel, _sample_kernel
from baton.kernels.sampling.draw import _choose_kernel, _draw_kernel, _draw_special_kernel, _prove_kernel
from baton.kernels.sampling.restrict import _restrict_kernel
from baton.kernels.sampling.scores import _keep_kernel, _score_parts_kernel, _score_rows_kernel
from baton.kernels.sampling.search import _search_few_kernel, _search_many_kernel
from baton.kernels.sampling.state import MOST_LIKELY, MOST_NAMED, SamplingState, Sizes
from baton.kernels.sampling.tops import _tops_kernel

__all__ = ["MOST_LIKELY", "MOST_NAMED", "SamplingState", "Sizes", "sample_special", "sample_tokens", "score_tokens"]

_WORDS = 1024  # of a bitmap, at once
_MANY = 64  # sequences or positions at once


def sample_tokens(
    logits: Tensor, out: Tensor, state: SamplingState, batch_rows: Tensor, seq_lens: Tensor, token_ids: Tensor
) -> None:
    """Samples out [num_rows] int32 from logits [num_rows, vocab_size], for rows without edits and filters; padding: 0.

    batch_rows [num_rows] int32 are the rows' indices in the columns and in token_ids [batch_rows, max_model_len]; -1 is
    padding. seq_lens [num_rows] int32 are the tokens before the sampled one, which is also written to token_ids there.
    """
    num_rows = logits.shape[0]
    _draw_kernel[(state.num_parts, num_rows)](
        state.best,
        state.index,
        logits,
        batch_rows,
        seq_lens,
        state.columns.words,
        state.columns.stride,
        logits.stride(0),
        state.vocab_size,
        state.num_parts,
        PART=state.sizes.part,
        num_warps=8,
        **_options(logits),
    )
    _choose(logits, out, state, batch_rows, seq_lens, token_ids, special=False)


def sample_special(
    logits: Tensor, out: Tensor, state: SamplingState, batch_rows: Tensor, seq_lens: Tensor, token_ids: Tensor
) -> None:
    """Samples the other rows, and rows with a mask in state.mask_of, after sample_tokens, whose `out` it overwrites.

    Counts the sampled tokens. Does not change the logits. Stores those that tokens are drawn from, if the state keeps
    them.
    """
    num_rows = logits.shape[0]
    sizes, columns, num_parts = state.sizes, state.columns, state.num_parts
    options = _options(logits)
    rows, parts = (num_rows,), (num_parts, num_rows)
    # Arguments of all kernels that read edited logits.
    edits = (columns.words, state.counts.by_token, state.bits)
    strides = (columns.stride, logits.stride(0), state.counts.by_token.stride(0), state.num_words)
    cut = {"PROMPT": state.counts.prompt_flag, **options}
    chunks = {"PART": sizes.part, "CHUNK": state.chunk}
    _restrict_kernel[rows](
        state.needs,
        state.bits,
        batch_rows,
        seq_lens,
        token_ids,
        columns.words,
        state.mask_of,
        state.masks,
        columns.stride,
        token_ids.stride(0),
        state.num_words,
        state.num_words,
        WORDS=_WORDS,
        MANY=_MANY,
        num_warps=8,
        **options,
    )
    looked = (state.chunk_tops, state.part_tops, state.part_sums)
    look = (logits, batch_rows, *edits, *strides, state.vocab_size, num_parts)
    _tops_kernel[parts](state.best, state.index, *looked, state.needs, *look, num_warps=16, **chunks, **cut)
    guess = (state.chunk_counts, state.chunks)
    _guess_kernel[rows](
        state.cuts,
        state.list_counts,
        *guess,
        *looked,
        state.needs,
        batch_rows,
        columns.words,
        columns.stride,
        state.vocab_size,
        num_parts,
        PARTS_PAD=state.parts_pad,
        CAPACITY=sizes.capacity,
        num_warps=4,
        **chunks,
        **options,
    )
    _sample_kernel[rows](
        state.cuts,
        state.bounds,
        *guess,
        state.chunk_tops,
        state.needs,
        *look,
        PARTS_PAD=state.parts_pad,
        SAMPLE=sizes.sample,
        num_warps=16,
        **chunks,
        **cut,
    )
    _draw_edited(logits, state, batch_rows, seq_lens, late=False)
    _prove_kernel[rows](
        state.needs,
        state.best,
        state.index,
        state.trial_sums,
        state.cuts,
        *look,
        PARTS_PAD=state.parts_pad,
        num_warps=1,
        **cut,
    )
    listed = (state.list_counts, state.list_logits, state.list_tokens, state.above_counts, state.above_sums, state.cuts)
    _collect_kernel[parts](
        *listed, *guess, state.needs, *look, CAPACITY=sizes.capacity, num_warps=16, maxnreg=64, **chunks, **cut
    )
    drawn = (state.best, state.index, state.bounds, state.needs)
    search = (*drawn, *listed, state.chunk_counts, seq_lens)
    searched = {
        "CAPACITY": sizes.capacity,
        "PART_CHUNKS": sizes.part // state.chunk,
        "PARTS_PAD": state.parts_pad,
    }
    _search_few_kernel[rows](
        *search,
        batch_rows,
        columns.words,
        columns.stride,
        num_parts,
        WIDTH=sizes.few,
        num_warps=4,
        **searched,
        **options,
    )
    _search_many_kernel[rows](*search, *look, FEW=sizes.few, SCAN=sizes.scan, num_warps=16, **searched, **cut)
    _draw_edited(logits, state, batch_rows, seq_lens, late=True)
    if state.processed is not None:
        _keep_kernel[parts](
            state.processed,
            state.bounds,
            state.needs,
            *look[:-1],
            PROMPT=state.counts.prompt_flag,
            PART=sizes.part,
            num_warps=8,
            **options,
        )
    _choose(logits, out, state, batch_rows, seq_lens, token_ids, special=True)


def score_tokens(
    logits: Tensor, tokens: Tensor, state: SamplingState, batch_rows: Tensor, *, normalized: bool = True
) -> Tensor:
    """Returns [num_rows, FOUND_WIDTH] int32 for rows that ask for log-probabilities: those of the sampled tokens
    [num_rows] int32, their ranks, the most likely tokens, theirs, and those of the tokens in the row's lists.

    Without `normalized`, returns the logits themselves instead of log-probabilities.
    """
    num_rows = logits.shape[0]
    scratch = (state.score_tops, state.score_sums, state.ranks, state.likely_logits, state.likely_tokens)
    columns, options = state.columns, _options(logits)
    _score_parts_kernel[(state.num_parts, num_rows)](
        *scratch,
        logits,
        tokens,
        batch_rows,
        columns.words,
        columns.stride,
        logits.stride(0),
        state.vocab_size,
        state.num_parts,
        PART=state.sizes.part,
        MOST=MOST_LIKELY,
        num_warps=8,
        **options,
    )
    _score_rows_kernel[(num_rows,)](
        state.found,
        *scratch,
        logits,
        tokens,
        batch_rows,
        columns.words,
        columns.stride,
        logits.stride(0),
        state.num_words,
        state.num_parts,
        PARTS_PAD=state.parts_pad,
        MOST=MOST_LIKELY,
        NAMED=MOST_NAMED,
        NORMALIZED=normalized,
        num_warps=4,
        **options,
    )
    return state.found[:num_rows]


def _draw_edited(logits: Tensor, state: SamplingState, batch_rows: Tensor, seq_lens: Tensor, *, late: bool) -> None:
    columns, counts = state.columns, state.counts
    _draw_special_kernel[(state.num_parts, logits.shape[0])](
        state.best,
        state.index,
        state.bounds,
        state.needs,
        state.trial_sums,
        state.cuts,
        logits,
        batch_rows,
        seq_lens,
        columns.words,
        counts.by_token,
        state.bits,
        columns.stride,
        logits.stride(0),
        counts.by_token.stride(0),
        state.num_words,
        state.vocab_size,
        state.num_parts,
        LATE=late,
        PROMPT=counts.prompt_flag,
        PART=state.sizes.part,
        num_warps=16,
        **_options(logits),
    )


def _choose(
    logits: Tensor,
    out: Tensor,
    state: SamplingState,
    batch_rows: Tensor,
    seq_lens: Tensor,
    token_ids: Tensor,
    *,
    special: bool,
) -> None:
    counts = state.counts.by_token
    _choose_kernel[(logits.shape[0],)](
        out,
        token_ids,
        state.best,
        state.index,
        batch_rows,
        seq_lens,
        state.columns.words,
        counts,
        state.needs,
        state.columns.stride,
        counts.stride(0),
        token_ids.stride(0),
        state.num_parts,
        SPECIAL=special,
        PARTS_PAD=state.parts_pad,
        num_warps=1,
        **_options(logits),
    )


def _options(logits: Tensor) -> dict[str, Any]:
    """Returns compiler options. Products are rounded before they are added, as in the reference."""
    overlap = overlaps(logits)
    return {"OVERLAP": overlap, "launch_pdl": overlap, "enable_fp_fusion": False}
