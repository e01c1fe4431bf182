"""Clears the blocks of tokens that a step begins, where blocks may have held states of recurrent layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps

_WORDS = 2048  # of 32 bits, that a program stores at once


# Slices of one buffer have any alignment, and each alignment would be compiled separately.
@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "before_ptr", "after_ptr"])
def _clear_begun_kernel(
    pool_ptr,  # [num_layers, num_blocks, WORDS] int32
    table_ptr,  # [num_rows, table_stride] int32
    rows_ptr,  # [num_seqs] int32; -1 is padding
    before_ptr,  # [num_seqs] int32
    after_ptr,  # [num_seqs] int32
    table_stride,
    layer_stride,
    BLOCK_SIZE: tl.constexpr,
    WORDS: tl.constexpr,  # of a block in one layer
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """pool[layer, table[row, (after - 1) / BLOCK_SIZE]] = 0 if this block's first token is not before `before`"""
    # grid: (num_seqs, num_layers)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(0)
    row = tl.load(rows_ptr + seq)
    before = tl.load(before_ptr + seq)
    after = tl.load(after_ptr + seq)
    last = (after - 1) // BLOCK_SIZE
    if (row >= 0) & (after > before) & (last * BLOCK_SIZE >= before):
        block = tl.load(table_ptr + row.to(tl.int64) * table_stride + last).to(tl.int64)
        at = pool_ptr + tl.program_id(1).to(tl.int64) * layer_stride + block * WORDS
        words = tl.arange(0, BLOCK)
        for start in range(0, WORDS, BLOCK):
            tl.store(at + start + words, tl.zeros([BLOCK], tl.int32), mask=start + words < WORDS)


def clear_begun(pool: Tensor, block_table: Tensor, rows: Tensor, before: Tensor, after: Tensor) -> None:
    """Sets the last block of each sequence to zeros if its first token is one of [before, after).

    Attention reads a whole block and multiplies what is behind the last token by 0, which the bits of a state may be
    NaN for. pool [num_layers, num_blocks, parts, heads, block_size, values]; block_table [num_rows, max_blocks]; rows
    (-1: padding), before and after [num_seqs]: tokens that a sequence has before and after the step. All int32.
    """
    words = pool.view(pool.shape[0], pool.shape[1], -1).view(torch.int32)
    overlap = overlaps(rows)
    _clear_begun_kernel[(len(rows), len(words))](
        words,
        block_table,
        rows,
        before,
        after,
        block_table.stride(0),
        words.stride(0),
        BLOCK_SIZE=pool.shape[4],
        WORDS=words.shape[2],
        BLOCK=min(_WORDS, triton.next_power_of_2(words.shape[2])),
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
