"""KV blocks between the pool and one contiguous piece of memory, as they travel between workers; all layers at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # words a program


# Slices of one buffer come at any alignment; each would be compiled on its own.
@triton.jit(do_not_specialize_on_alignment=["block_ids_ptr"])
def _copy_kernel(
    pool_ptr,  # [num_layers, num_blocks, SIZE], layers of layer_stride
    staging_ptr,  # [num_ids, num_layers, SIZE]
    block_ids_ptr,  # [num_ids] int32
    layer_stride,
    SIZE: tl.constexpr,  # words of one layer of one block
    BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
):
    """staging[i, layer] = pool[layer, block_ids[i]], or back"""
    # grid: (num_ids, num_layers, SIZE / BLOCK)
    index = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = words < SIZE
    block = tl.load(block_ids_ptr + index).to(tl.int64)
    pool = pool_ptr + layer * layer_stride + block * SIZE + words
    staging = staging_ptr + (index * tl.num_programs(1) + layer) * SIZE + words
    if GATHER:
        tl.store(staging, tl.load(pool, mask=inside), mask=inside)
    else:
        tl.store(pool, tl.load(staging, mask=inside), mask=inside)


def gather_blocks(pool: Tensor, block_ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """[n, num_layers, ...] of pool [num_layers, num_blocks, ...] for block_ids [n] int32; a part of the layers is
    `pool[first:last]`."""
    if out is None:
        size = (block_ids.shape[0], pool.shape[0], *pool.shape[2:])
        out = torch.empty(size, dtype=pool.dtype, device=pool.device)
    _copy(pool, block_ids, out, gather=True)
    return out


def scatter_blocks(pool: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """The way back: staging [n, num_layers, ...] into pool, in place; block_ids [n] int32 are distinct."""
    _copy(pool, block_ids, staging, gather=False)


def _copy(pool: Tensor, block_ids: Tensor, staging: Tensor, *, gather: bool) -> None:
    expected = (block_ids.shape[0], pool.shape[0], *pool.shape[2:])
    if staging.shape != expected or not staging.is_contiguous() or not pool[0].is_contiguous():
        raise ValueError(f"staging is {tuple(staging.shape)}; it must be {expected}, and both must be contiguous")
    if not block_ids.shape[0]:
        return
    pool_words, staging_words = _as_words(pool.flatten(2)), _as_words(staging.flatten(2))
    size = pool_words.shape[2]
    _copy_kernel[(block_ids.shape[0], pool.shape[0], triton.cdiv(size, _BLOCK))](
        pool_words,
        staging_words,
        block_ids,
        pool_words.stride(0),
        SIZE=size,
        BLOCK=_BLOCK,
        GATHER=gather,
        num_warps=8,
    )


def _as_words(tensor: Tensor) -> Tensor:
    """[..., bytes] as 64-bit words where a block is a whole number of them."""
    whole = tensor.shape[-1] * tensor.element_size() % 8 == 0
    return tensor.view(torch.int64 if whole else torch.uint8)
