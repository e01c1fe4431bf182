"""Helpers that the Gluon kernels for Hopper share."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

# Of the threads of one warp group, where a kernel is specialized by warps.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # Triton 3.6, from 3.7 on
