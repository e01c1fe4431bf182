"""Helpers shared by the Gluon kernels for Hopper."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

# For the threads of one warp group in a warp-specialized kernel.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # Triton 3.6, from 3.7 on
# Start a copy of a tile to shared memory, and from it: up to Triton 3.7, from 3.8 on.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
# Starts copies of single elements to shared memory: the same versions.
load_elements = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

_PUBLIC: gl.constexpr = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # from Triton 3.9 on


@gluon.jit
def reinterpret(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Returns shared memory as tiles of another shape and layout."""
    if _PUBLIC:
        return buffer.reinterpret(dtype, shape, layout)
    else:  # noqa: RET505 - only one branch is compiled
        return buffer._reinterpret(dtype, shape, layout)


@gluon.jit
def sigmoid(value):
    """Returns 1 / (1 + e^-value). A division takes several times as many instructions as the approximate reciprocal."""
    power = gl.exp2(value * -1.4426950408889634)
    code: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(code, "=f,f", [1.0 + power], gl.float32, is_pure=True, pack=1)


@gluon.jit
def gdc_wait():
    """Waits until the previous kernel's results are visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def gdc_launch_dependents():
    """Allows the next kernel to start."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
