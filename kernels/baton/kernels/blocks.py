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


class BlockCopier:
    """The same copies of one pool on the GPU, by address: where the launch's time on the host counts.

    Staging is [num_ids, num_layers, bytes of one layer of one block], at a multiple of 16 bytes; block ids are int32 in
    memory that the device can read, pinned host memory included.
    """

    def __init__(self, pool: Tensor) -> None:
        """`pool` [num_layers, num_blocks, ...]. Raises ValueError where a block is no multiple of 16 bytes."""
        words = _as_words(pool.flatten(2))
        size = words.shape[2]
        if words.dtype != torch.int64 or size % 2 or not pool.is_contiguous():
            raise ValueError(f"a layer of a block has {size} {words.dtype}; it must be a whole number of 16 bytes")
        self.bytes_per_block_layer = 8 * size
        self._pool = words
        self._start: int = words.data_ptr()
        self._stride: int = words.stride(0)
        self._num_programs = triton.cdiv(size, _BLOCK)
        self._constants = {gather: (size, _BLOCK, gather) for gather in (True, False)}
        staging = torch.empty(1, 1, size, dtype=torch.int64, device=pool.device)
        block_ids = torch.zeros(1, dtype=torch.int32, device=pool.device)
        self._kernels = {
            gather: _copy_kernel.warmup(
                words, staging, block_ids, self._stride, SIZE=size, BLOCK=_BLOCK, GATHER=gather, num_warps=8, grid=(1,)
            )
            for gather in (True, False)
        }

    def gather(self, layers: range, block_ids: int, num_ids: int, staging: int, stream: int) -> None:
        """Queues staging[i, layer - layers.start] = pool[layer, block_ids[i]]."""
        self._launch(True, layers, block_ids, num_ids, staging, stream)

    def scatter(self, layers: range, block_ids: int, num_ids: int, staging: int, stream: int) -> None:
        """Queues the way back; block ids are distinct."""
        self._launch(False, layers, block_ids, num_ids, staging, stream)

    def _launch(self, gather: bool, layers: range, block_ids: int, num_ids: int, staging: int, stream: int) -> None:
        self._kernels[gather][(num_ids, len(layers), self._num_programs)](
            self._start + 8 * layers.start * self._stride,
            staging,
            block_ids,
            self._stride,
            *self._constants[gather],
            stream=stream,
        )


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
