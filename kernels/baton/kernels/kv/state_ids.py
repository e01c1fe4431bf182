"""Where the pieces of a step's recurrent states lie in a pool, from the records of the batch's rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps

_ALIGNED = 4  # sequences: each layer's ids begin at a multiple of 16 bytes


# Slices of one buffer have any alignment, and each alignment would be compiled separately.
@triton.jit(
    do_not_specialize=["num_pieces", "num_each", "num_padded", "record_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "before_ptr", "after_ptr"],
)
def _state_ids_kernel(
    out_ptr,  # [num_layers, 2, num_padded, num_each] int32
    records_ptr,  # [num_rows, 2 + 2 * NUM_PAGES] int32
    rows_ptr,  # [num_seqs] int32; -1 is padding
    before_ptr,  # [num_seqs] int32
    after_ptr,  # [num_seqs] int32
    pages_ptr,  # [num_layers * num_each] int32
    bases_ptr,  # [num_layers * num_each] int32
    num_pieces,  # num_layers * num_each
    num_each,
    num_padded,
    record_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    PAGE_UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """id = record.pages[slot, page] * PAGE_UNITS + base, of the slot whose number is (tokens - 1) / BLOCK_SIZE"""
    # grid: (num_seqs, 2, num_pieces / BLOCK); the second is 0 for states before the step, 1 for those after it
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(0)
    side = tl.program_id(1)
    row = tl.load(rows_ptr + seq)
    before = tl.load(before_ptr + seq)
    after = tl.load(after_ptr + seq)
    tokens = tl.where(side == 0, before, after)
    number = (tokens - 1) // BLOCK_SIZE
    record = records_ptr + tl.maximum(row, 0).to(tl.int64) * record_stride
    second = tl.load(record + 1) == number
    found = (row >= 0) & (tokens > 0) & (second | (tl.load(record) == number))
    slot = tl.where(second, NUM_PAGES, 0)
    piece = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = piece < num_pieces
    page = tl.load(pages_ptr + piece, mask=inside, other=0)
    held = piece < tl.where(found, num_pieces, 0)
    start = tl.load(record + 2 + slot + page, mask=held, other=0) * PAGE_UNITS
    ids = tl.where(held, start + tl.load(bases_ptr + piece, mask=inside, other=0), -1)
    layer = piece // num_each
    out_at = ((layer * 2 + side) * num_padded + seq) * num_each + piece % num_each
    tl.store(out_ptr + out_at, ids, mask=inside)


def state_ids(
    records: Tensor,
    rows: Tensor,
    before: Tensor,
    after: Tensor,
    pages: Tensor,
    bases: Tensor,
    *,
    block_size: int,
    page_units: int,
) -> tuple[Tensor, Tensor]:
    """Returns the ids of one matrix's pieces in all layers: those to read and those to write.

    Each is [num_layers, num_seqs, pieces] int32, contiguous for a layer; -1: none. `records` [num_rows, 2 + 2 * pages]
    int32: the numbers of the blocks at whose ends a row's two states are, -2: no state; then the pages of both. rows
    [num_seqs] (-1: padding); before and after [num_seqs]: tokens that a sequence has. Of each piece, pages
    [num_layers, pieces] is its page in a state, and bases [num_layers, pieces] its place in page 0. `page_units`: units
    of ids from one page to the next.
    """
    num_layers, num_each = pages.shape
    num_seqs = rows.shape[0]
    padded = -(-num_seqs // _ALIGNED) * _ALIGNED
    out = torch.empty(num_layers, 2, padded, num_each, dtype=torch.int32, device=records.device)
    num_pieces = num_layers * num_each
    block = min(1024, triton.next_power_of_2(num_pieces))
    overlap = overlaps(rows)
    _state_ids_kernel[(num_seqs, 2, triton.cdiv(num_pieces, block))](
        out,
        records,
        rows,
        before,
        after,
        pages,
        bases,
        num_pieces,
        num_each,
        padded,
        records.stride(0),
        BLOCK_SIZE=block_size,
        NUM_PAGES=(records.shape[1] - 2) // 2,
        PAGE_UNITS=page_units,
        BLOCK=block,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
    return out[:, 0, :num_seqs], out[:, 1, :num_seqs]
