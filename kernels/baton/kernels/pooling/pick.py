"""One vector for each segment of a step's hidden states: that of its first or last token, their mean or maximum.

A segment may be one of several chunks of a text. What the chunks add up to is then kept from step to step, by row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.pooling_spec import PICKS, Pick

_BLOCK_DIMS = 128
_BLOCK_TOKENS = 16
_FIRST = tl.constexpr(PICKS.index("first"))
_LAST = tl.constexpr(PICKS.index("last"))
_MEAN = tl.constexpr(PICKS.index("mean"))


@triton.jit(do_not_specialize_on_alignment=["segments_ptr"])
def _pick_kernel(
    out_ptr,  # [num_segments, size]
    hidden_ptr,  # [num_tokens, size]
    kept_ptr,  # [num_rows, size] fp32
    segments_ptr,  # [4, num_segments] int64: first token, tokens, row, tokens in earlier steps
    size,
    PICK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
):
    """out_s = pick(hidden_t of the segment's tokens t, kept_row if there were earlier tokens); kept_row = out_s"""
    # grid: (num_segments, size / BLOCK_DIMS)
    segment = tl.program_id(0)
    num_segments = tl.num_programs(0)
    first = tl.load(segments_ptr + segment)
    count = tl.load(segments_ptr + num_segments + segment)
    row = tl.load(segments_ptr + 2 * num_segments + segment)
    before = tl.load(segments_ptr + 3 * num_segments + segment)
    dims = tl.program_id(1) * BLOCK_DIMS + tl.arange(0, BLOCK_DIMS)
    inside = dims < size
    kept_at = kept_ptr + row * size + dims
    # Compared in blocks: not every interpreter of Triton takes the & of a block and a scalar as a mask.
    kept = dims < tl.where(row >= 0, size, 0)
    later = dims < tl.where((row >= 0) & (before > 0), size, 0)
    if PICK == _LAST:
        found = tl.load(hidden_ptr + (first + count - 1) * size + dims, mask=inside, other=0.0).to(tl.float32)
    elif PICK == _FIRST:
        found = tl.load(hidden_ptr + first * size + dims, mask=inside, other=0.0).to(tl.float32)
        found = tl.where(later, tl.load(kept_at, mask=later, other=0.0), found)
    else:
        empty = 0.0 if PICK == _MEAN else float("-inf")
        tokens = tl.arange(0, BLOCK_TOKENS)
        found = tl.load(kept_at, mask=later, other=empty)
        for start in range(0, count, BLOCK_TOKENS):
            mine = start + tokens
            at = hidden_ptr + (first + mine)[:, None] * size + dims[None, :]
            states = tl.load(at, mask=(mine < count)[:, None] & inside[None, :], other=empty).to(tl.float32)
            found = found + tl.sum(states, 0) if PICK == _MEAN else tl.maximum(found, tl.max(states, 0))
    tl.store(kept_at, found, mask=kept)
    if PICK == _MEAN:
        found = found / (before + count).to(tl.float32)
    tl.store(out_ptr + segment.to(tl.int64) * size + dims, found.to(out_ptr.dtype.element_ty), mask=inside)


def pick_vectors(hidden: Tensor, segments: Tensor, pick: Pick, kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the vectors [num_segments, size] of segments of hidden [num_tokens, size].

    segments [4, num_segments] int64: first token, number of tokens, row of `kept` (-1: the segment is a whole text),
    and the text's tokens in earlier steps. kept [num_rows, size] fp32 is updated; it may be empty without such rows.
    """
    num_segments, size = segments.shape[1], hidden.shape[1]
    out = torch.empty(num_segments, size, dtype=dtype, device=hidden.device)
    _pick_kernel[(num_segments, triton.cdiv(size, _BLOCK_DIMS))](
        out,
        hidden.contiguous(),
        kept,
        segments,
        size,
        PICK=PICKS.index(pick),
        BLOCK_TOKENS=_BLOCK_TOKENS,
        BLOCK_DIMS=_BLOCK_DIMS,
        num_warps=4,
    )
    return out
