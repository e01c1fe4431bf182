"""Helpers shared by the Gluon kernels for Hopper."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# For the threads of one warp group in a warp-specialized kernel.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # Triton 3.6, from 3.7 on
# Start a copy of a tile to shared memory, and from it: up to Triton 3.7, from 3.8 on.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

_PUBLIC: gl.constexpr = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # from Triton 3.9 on


@gluon.jit
def reinterpret(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Returns shared memory as tiles of another shape and layout."""
    if _PUBLIC:
        return buffer.reinterpret(dtype, shape, layout)
    else:  # noqa: RET505 - only one branch is compiled
        return buffer._reinterpret(dtype, shape, layout)
