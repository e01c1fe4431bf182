"""The counts of each token in a row's output, and whether its prompt has it, for penalties.

A count takes 16 bits if every row is short enough, otherwise 32. One bit marks tokens of the prompt.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.sampling.columns import NUM_PROMPT, REPETITION, load_fraction, load_number

_PART = 4096
_TOKENS = 512


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _clear_kernel(
    counts_ptr,  # [batch_rows, row_words] int32
    rows_ptr,  # [num_rows] int32
    row_words,
    PART: tl.constexpr,
):
    """counts = 0"""
    # grid: (row_words / PART, num_rows)
    row = tl.load(rows_ptr + tl.program_id(1)).to(tl.int64)
    index = tl.program_id(0) * PART + tl.arange(0, PART)
    tl.store(counts_ptr + row * row_words + index, tl.zeros([PART], tl.int32), mask=index < row_words)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "lengths_ptr"])
def _count_kernel(
    counts_ptr,  # [batch_rows, row_words] int32
    rows_ptr,  # [num_rows] int32
    lengths_ptr,  # [num_rows] int32
    token_ids_ptr,  # [batch_rows, tokens_stride] int32
    columns_ptr,
    row_words,
    tokens_stride,
    stride,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """counts[token] |= 2^(BITS - 2) for the prompt's tokens, if repetition counts; += 1 for the output's"""
    # grid: (longest / TOKENS, num_rows)
    row = tl.load(rows_ptr + tl.program_id(1)).to(tl.int64)
    row_ptr = columns_ptr + row
    num_prompt = load_number(row_ptr, stride, NUM_PROMPT)
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    used = place < tl.load(lengths_ptr + tl.program_id(1))
    token = tl.load(token_ids_ptr + row * tokens_stride + place, mask=used, other=0)
    PACKED: tl.constexpr = 32 // BITS
    word = counts_ptr + row * row_words + token // PACKED
    shift = (token % PACKED) * BITS
    one = tl.full([TOKENS], 1, tl.int32)
    if load_fraction(row_ptr, stride, REPETITION) != 1:
        tl.atomic_or(word, one << (shift + BITS - 2), mask=used & (place < num_prompt))
    tl.atomic_add(word, one << shift, mask=used & (place >= num_prompt))


class TokenCounts:
    """The token counts of all rows of the persistent batch."""

    def __init__(self, num_rows: int, vocab_size: int, max_model_len: int, device: torch.device) -> None:
        self.bits = 16 if max_model_len < 1 << 14 else 32
        self.prompt_flag = 1 << (self.bits - 2)
        row_words = triton.cdiv(vocab_size, 64) * 64 * self.bits // 32
        self.words = torch.zeros(num_rows, row_words, dtype=torch.int32, device=device)
        # [num_rows, at least vocab_size]
        self.by_token = self.words.view(torch.int16) if self.bits == 16 else self.words

    def restart(
        self, rows: Tensor, lengths: Tensor, longest: int, columns: Tensor, stride: int, token_ids: Tensor
    ) -> None:
        """Recounts the known tokens of rows. rows and lengths [n] are int32 on the device, `longest` is their maximum.

        columns and stride are those of SamplingColumns; token_ids [num_rows, max_model_len] int32.
        """
        row_words = self.words.shape[1]
        _clear_kernel[(triton.cdiv(row_words, _PART), len(rows))](self.words, rows, row_words, PART=_PART, num_warps=8)
        _count_kernel[(triton.cdiv(longest, _TOKENS), len(rows))](
            self.words,
            rows,
            lengths,
            token_ids,
            columns,
            row_words,
            token_ids.stride(0),
            stride,
            BITS=self.bits,
            TOKENS=_TOKENS,
            num_warps=4,
        )
