"""Helpers shared by the Gluon kernels for Hopper."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

# For the threads of one warp group in a warp-specialized kernel.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # Triton 3.6, from 3.7 on
