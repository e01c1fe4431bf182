"""Copies KV blocks of all layers between the pool and contiguous memory, for transfers between workers."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # words that a program copies at a time
_NUM_WARPS = 8
ALL_PROGRAMS = 1 << 30  # one for each part of a block; with fewer, each copies several parts
_NUM_ARGUMENTS = 6  # of the kernel, without constants
_NUM_ITEMS = 4  # its index among them
_NUM_SCRATCH = 2  # pointers that Triton appends, unused by this kernel


# Slices of one buffer have any alignment, and each alignment would be compiled separately.
@triton.jit(do_not_specialize_on_alignment=["block_ids_ptr"], do_not_specialize=["num_items", "num_layers"])
def _copy_kernel(
    pool_ptr,  # [num_layers, num_blocks, SIZE], layers are layer_stride apart
    staging_ptr,  # [num_ids, num_layers, SIZE]
    block_ids_ptr,  # [num_ids] int32
    layer_stride,
    num_items,  # num_ids * num_layers * SIZE / BLOCK, rounded up
    num_layers,
    SIZE: tl.constexpr,  # words of one layer of one block
    BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
):
    """staging[i, layer] = pool[layer, block_ids[i]], or back"""
    # grid: at most num_items
    PARTS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    # Adjacent parts, which have few distinct blocks: ids may be in host memory, where concurrent reads are slow.
    num_each = tl.cdiv(num_items, tl.num_programs(0))
    first = tl.program_id(0) * num_each
    for item in range(first, tl.minimum(first + num_each, num_items)):
        row = item // PARTS
        words = item % PARTS * BLOCK + tl.arange(0, BLOCK)
        inside = words < SIZE
        layer = (row % num_layers).to(tl.int64)
        block = tl.load(block_ids_ptr + row // num_layers).to(tl.int64)
        pool = pool_ptr + layer * layer_stride + block * SIZE + words
        staging = staging_ptr + row.to(tl.int64) * SIZE + words
        if GATHER:
            tl.store(staging, tl.load(pool, mask=inside), mask=inside)
        else:
            tl.store(pool, tl.load(staging, mask=inside), mask=inside)


def gather_blocks(pool: Tensor, block_ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Returns [n, num_layers, ...] of pool [num_layers, num_blocks, ...] for block_ids [n] int32. For some layers, pass
    `pool[first:last]`."""
    if out is None:
        size = (block_ids.shape[0], pool.shape[0], *pool.shape[2:])
        out = torch.empty(size, dtype=pool.dtype, device=pool.device)
    _copy(pool, block_ids, out, gather=True)
    return out


def scatter_blocks(pool: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Copies staging [n, num_layers, ...] back into pool, in place; block_ids [n] int32 are distinct."""
    _copy(pool, block_ids, staging, gather=False)


class BlockCopier:
    """Copies of one pool on the GPU by addresses, with little overhead on the host.

    Staging is [num_ids, num_layers, bytes of one layer of one block], aligned to 16 bytes. Block ids are int32 in any
    memory that the device can read, such as pinned host memory.
    """

    def __init__(self, pool: Tensor) -> None:
        """`pool` is [num_layers, num_blocks, ...].

        Raises ValueError if a block is not a multiple of 16 bytes.
        """
        words = _as_words(pool.flatten(2))
        size = words.shape[2]
        if words.dtype != torch.int64 or size % 2 or not pool.is_contiguous():
            raise ValueError(f"a layer of a block has {size} {words.dtype}; it must be a whole number of 16 bytes")
        self.bytes_per_block_layer = 8 * size
        self._pool = words
        self._start: int = words.data_ptr()
        self._stride: int = words.stride(0)
        self._num_parts = triton.cdiv(size, _BLOCK)
        staging = torch.empty(1, 1, size, dtype=torch.int64, device=pool.device)
        block_ids = torch.zeros(1, dtype=torch.int32, device=pool.device)
        self._kernels = {
            gather: _copy_kernel.warmup(
                words,
                staging,
                block_ids,
                self._stride,
                self._num_parts,
                1,
                SIZE=size,
                BLOCK=_BLOCK,
                GATHER=gather,
                num_warps=_NUM_WARPS,
                grid=(1,),
            )
            for gather in (True, False)
        }

    def lane(self) -> BlockLane:
        """Returns a launcher for one thread at a time."""
        return BlockLane(BlockCopy(self._kernels[True]), BlockCopy(self._kernels[False]))

    def arguments(self, layers: range, block_ids: int, num_ids: int, staging: int) -> tuple[int, ...]:
        """Returns the kernel's arguments, in order."""
        start = self._start + 8 * layers.start * self._stride
        return start, staging, block_ids, self._stride, num_ids * len(layers) * self._num_parts, len(layers)


class BlockLane(NamedTuple):
    """The copies of any pool of one shape. Holds no pool."""

    gather: BlockCopy  # staging[i, layer - layers.start] = pool[layer, block_ids[i]]; staging may be a peer's memory
    scatter: BlockCopy  # the inverse; block ids are distinct


class BlockCopy:
    """A compiled kernel that is launched through the CUDA driver, because Triton's launch takes 0.1 ms when the Python
    interpreter's caches are cold.

    By its documentation, cuLaunchKernel copies the arguments from the given addresses before it returns.
    """

    def __init__(self, kernel: Any) -> None:
        kernel[(1, 1, 1)]  # loads the kernel to the device
        self._function = ctypes.c_void_p(kernel.function)
        self._shared = kernel.metadata.shared
        self._arguments = (ctypes.c_uint64 * (_NUM_ARGUMENTS + _NUM_SCRATCH))()
        start, size = ctypes.addressof(self._arguments), ctypes.sizeof(ctypes.c_uint64)
        addresses = [start + index * size for index in range(len(self._arguments))]
        self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
        self._launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]

    def __call__(
        self,
        pool: BlockCopier,
        layers: range,
        block_ids: int,
        num_ids: int,
        staging: int,
        stream: int,
        max_programs: int = ALL_PROGRAMS,
    ) -> None:
        """Queues the copy. `block_ids` and `staging` are addresses. Raises RuntimeError if the driver rejects it."""
        arguments = pool.arguments(layers, block_ids, num_ids, staging)
        self._arguments[:_NUM_ARGUMENTS] = list(arguments)
        num_programs = min(arguments[_NUM_ITEMS], max_programs)
        status = self._launch(
            self._function, num_programs, 1, 1, 32 * _NUM_WARPS, 1, 1, self._shared, stream, self._addresses, None
        )
        if status:
            raise RuntimeError(f"a copy of {num_programs} programs was not launched: CUDA error {status}")


def _copy(pool: Tensor, block_ids: Tensor, staging: Tensor, *, gather: bool) -> None:
    expected = (block_ids.shape[0], pool.shape[0], *pool.shape[2:])
    if staging.shape != expected or not staging.is_contiguous() or not pool[0].is_contiguous():
        raise ValueError(f"staging is {tuple(staging.shape)}; it must be {expected}, and both must be contiguous")
    if not block_ids.shape[0]:
        return
    pool_words, staging_words = _as_words(pool.flatten(2)), _as_words(staging.flatten(2))
    size = pool_words.shape[2]
    num_items = block_ids.shape[0] * pool.shape[0] * triton.cdiv(size, _BLOCK)
    _copy_kernel[(num_items,)](
        pool_words,
        staging_words,
        block_ids,
        pool_words.stride(0),
        num_items,
        pool.shape[0],
        SIZE=size,
        BLOCK=_BLOCK,
        GATHER=gather,
        num_warps=_NUM_WARPS,
    )


def _as_words(tensor: Tensor) -> Tensor:
    """Views [..., bytes] as 64-bit words if a block has a whole number of them."""
    whole = tensor.shape[-1] * tensor.element_size() % 8 == 0
    return tensor.view(torch.int64 if whole else torch.uint8)
