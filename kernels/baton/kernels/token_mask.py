"""Tokens that may not be drawn, taken out of some rows' logits: reference.token_mask on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_PART = 4096  # tokens a program looks at


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "bits_ptr"])
def _token_mask_kernel(
    logits_ptr,  # [num_rows, logits_stride]
    rows_ptr,  # [num_masks] int32, into the logits
    bits_ptr,  # [num_masks, num_words] int32
    logits_stride,
    num_words,
    vocab_size,
    PART: tl.constexpr,
):
    """logit = -inf where bit t % 32 of word t // 32 is not set"""
    # grid: (vocab_size / PART, num_masks)
    item = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + item).to(tl.int64)
    token = tl.program_id(0) * PART + tl.arange(0, PART)
    inside = token < vocab_size
    word = tl.load(bits_ptr + item * num_words + token // 32, mask=inside, other=0)
    forbidden = ((word >> (token % 32)) & 1) == 0
    never = tl.full([PART], float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * logits_stride + token, never, mask=inside & forbidden)


def apply_token_masks(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """In place, for logits [num_rows, vocab_size] of any float: rows [num_masks] int32 keep the tokens of their bits.

    bits [num_masks, at least vocab_size / 32] int32: token t is kept where bit t % 32 of word t // 32 is set.
    """
    vocab_size = logits.shape[1]
    _token_mask_kernel[(triton.cdiv(vocab_size, _PART), len(rows))](
        logits, rows, bits, logits.stride(0), bits.stride(0), vocab_size, PART=_PART, num_warps=8
    )
