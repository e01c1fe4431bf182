"""Greedy choice over the vocabulary, and the way of sampled tokens into the persistent batch. No host in between."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _argmax_kernel(
    best_ptr,  # [num_rows, num_parts] fp32
    index_ptr,  # [num_rows, num_parts] int32
    logits_ptr,  # [num_rows, logits_stride]
    logits_stride,
    vocab_size,
    num_parts,
    BLOCK: tl.constexpr,
):
    """The largest of each part of the vocabulary, the first where several are equal"""
    # grid: (num_parts, num_rows)
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    index = part * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * logits_stride + index, mask=index < vocab_size, other=float("-inf"))
    logits = logits.to(tl.float32)
    top = tl.max(logits, 0)
    first = tl.min(tl.where(logits == top, index, 2147483647), 0)
    tl.store(best_ptr + row * num_parts + part, top)
    tl.store(index_ptr + row * num_parts + part, first)


@triton.jit
def _argmax_merge_kernel(
    out_ptr,  # [num_rows] int32
    best_ptr,  # [num_rows, num_parts] fp32
    index_ptr,  # [num_rows, num_parts] int32
    num_parts,
    PARTS_PAD: tl.constexpr,
):
    """The largest of all parts"""
    # grid: (num_rows)
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS_PAD)
    best = tl.load(best_ptr + row * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    index = tl.load(index_ptr + row * num_parts + parts, mask=parts < num_parts, other=2147483647)
    tl.store(out_ptr + row, tl.min(tl.where(best == tl.max(best, 0), index, 2147483647), 0))


class ArgmaxWorkspace:
    """Scratch memory of greedy_tokens."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.num_parts = triton.cdiv(vocab_size, _BLOCK)
        self.best = torch.empty(max_rows * self.num_parts, dtype=torch.float32, device=device)
        self.index = torch.empty(max_rows * self.num_parts, dtype=torch.int32, device=device)


def greedy_tokens(logits: Tensor, out: Tensor, workspace: ArgmaxWorkspace) -> None:
    """out [num_rows] int32 = the index of each row's largest of logits [num_rows, vocab_size], the first of equals."""
    num_rows, vocab_size = logits.shape
    _argmax_kernel[(workspace.num_parts, num_rows)](
        workspace.best,
        workspace.index,
        logits,
        logits.stride(0),
        vocab_size,
        workspace.num_parts,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    _argmax_merge_kernel[(num_rows,)](
        out,
        workspace.best,
        workspace.index,
        workspace.num_parts,
        PARTS_PAD=triton.next_power_of_2(workspace.num_parts),
        num_warps=1,
    )


@triton.jit
def _append_tokens_kernel(
    token_ids_ptr,  # [num_rows, tokens_stride] int32
    sampled_ptr,  # [num_sampled] int32
    sampled_seqs_ptr,  # [num_sampled] int32, into rows
    rows_ptr,  # [num_seqs] int32; -1 is padding
    seq_lens_ptr,  # [num_seqs] int32
    num_sampled,
    tokens_stride,
    BLOCK: tl.constexpr,
):
    """token_ids[row, seq_len] = sampled"""
    # grid: (num_sampled / BLOCK)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_sampled
    seq = tl.load(sampled_seqs_ptr + index, mask=inside, other=0)
    row = tl.load(rows_ptr + seq, mask=inside, other=-1).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + seq, mask=inside, other=0)
    token = tl.load(sampled_ptr + index, mask=inside, other=0)
    live = inside & (row >= 0) & (seq_len < tokens_stride)
    tl.store(token_ids_ptr + row * tokens_stride + seq_len, token, mask=live)


def append_tokens(token_ids: Tensor, sampled: Tensor, sampled_seqs: Tensor, rows: Tensor, seq_lens: Tensor) -> None:
    """Writes sampled [num_sampled] behind the last token of rows[sampled_seqs] in token_ids [num_rows, max_model_len].

    All int32; seq_lens [num_seqs] counts the step's tokens. A token beyond max_model_len is dropped.
    """
    count = sampled.shape[0]
    _append_tokens_kernel[(triton.cdiv(count, 256),)](
        token_ids, sampled, sampled_seqs, rows, seq_lens, count, token_ids.stride(0), BLOCK=256, num_warps=4
    )
