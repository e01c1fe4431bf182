"""Computes the inputs of a step on the device from the persistent batch: tokens, positions, slots, lengths."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps


# Slices of one buffer have any alignment, and each alignment would be compiled separately.
@triton.jit(
    do_not_specialize_on_alignment=[
        "tokens_out_ptr",
        "positions_out_ptr",
        "slots_out_ptr",
        "seq_lens_out_ptr",
        "rows_ptr",
        "num_computed_ptr",
        "query_start_loc_ptr",
    ]
)
def _step_inputs_kernel(
    tokens_out_ptr,  # [num_tokens] int32
    positions_out_ptr,  # [num_tokens] int32
    slots_out_ptr,  # [num_tokens] int32
    seq_lens_out_ptr,  # [num_seqs] int32
    token_ids_ptr,  # [num_rows, tokens_stride] int32
    block_table_ptr,  # [num_rows, table_stride] int32
    rows_ptr,  # [num_seqs] int32; -1 is padding
    num_computed_ptr,  # [num_seqs] int32
    query_start_loc_ptr,  # [num_seqs + 1] int32
    tokens_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """position = num_computed + i; slot = block_table[position / block_size] * block_size + position % block_size"""
    # grid: (num_seqs, max chunk / BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(0)
    row = tl.load(rows_ptr + seq).to(tl.int64)
    first = tl.load(query_start_loc_ptr + seq)
    count = tl.load(query_start_loc_ptr + seq + 1) - first
    computed = tl.load(num_computed_ptr + seq)
    live = row >= 0
    if tl.program_id(1) == 0:
        tl.store(seq_lens_out_ptr + seq, tl.where(live, computed + count, 0))
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    position = computed + index
    known = index < tl.where(live, count, 0)
    token = tl.load(token_ids_ptr + row * tokens_stride + position, mask=known, other=0)
    block = tl.load(block_table_ptr + row * table_stride + position // BLOCK_SIZE, mask=known, other=0)
    slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(tokens_out_ptr + first + index, token, mask=inside)
    tl.store(positions_out_ptr + first + index, tl.where(live, position, 0), mask=inside)
    tl.store(slots_out_ptr + first + index, slot, mask=inside)


def step_inputs(
    tokens: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    rows: Tensor,
    num_computed_tokens: Tensor,
    query_start_loc: Tensor,
    block_size: int,
    max_chunk: int,
) -> None:
    """Writes the first four arguments, [num_tokens] and seq_lens [num_seqs], for chunks at query_start_loc
    [num_seqs + 1]. token_ids [num_rows, max_model_len] and block_table [num_rows, max_blocks] are the persistent batch.

    A row of -1 is padding: token 0 at position 0, slot -1, length 0. All int32. `max_chunk` is the longest chunk.
    """
    block = 1 if max_chunk == 1 else 1024
    overlap = overlaps(rows)
    _step_inputs_kernel[(rows.shape[0], triton.cdiv(max_chunk, block))](
        tokens,
        positions,
        slot_mapping,
        seq_lens,
        token_ids,
        block_table,
        rows,
        num_computed_tokens,
        query_start_loc,
        token_ids.stride(0),
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=1 if block == 1 else 4,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["slots_out_ptr", "positions_ptr", "rows_ptr", "query_start_loc_ptr"],
)
def _group_slots_kernel(
    slots_out_ptr,  # [num_groups, num_tokens] int32
    tables_ptr,  # [num_groups, num_rows, table_stride] int32
    positions_ptr,  # [num_tokens] int32
    rows_ptr,  # [num_seqs] int32; -1 is padding
    query_start_loc_ptr,  # [num_seqs + 1] int32
    num_tokens,
    group_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """slot = tables[group, row, position / block_size] * block_size + position % block_size"""
    # grid: (num_seqs, max chunk / BLOCK, num_groups)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    seq, group = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row = tl.load(rows_ptr + seq).to(tl.int64)
    first = tl.load(query_start_loc_ptr + seq)
    count = tl.load(query_start_loc_ptr + seq + 1) - first
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    live = row >= 0
    position = tl.load(positions_ptr + first + index, mask=inside, other=0)
    table_ptr = tables_ptr + group * group_stride + row * table_stride
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=index < tl.where(live, count, 0), other=0)
    slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(slots_out_ptr + group * num_tokens + first + index, slot, mask=inside)


def group_slots(
    slots: Tensor,
    tables: Tensor,
    positions: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    block_size: int,
    max_chunk: int,
) -> None:
    """Writes slots [num_groups, num_tokens] for positions that `step_inputs` wrote, by tables [num_groups, num_rows,
    max_blocks]. The other arguments are as there.
    """
    block = 1 if max_chunk == 1 else 1024
    overlap = overlaps(rows)
    _group_slots_kernel[(rows.shape[0], triton.cdiv(max_chunk, block), len(tables))](
        slots,
        tables,
        positions,
        rows,
        query_start_loc,
        slots.stride(0),
        tables.stride(0),
        tables.stride(1),
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=1 if block == 1 else 4,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
