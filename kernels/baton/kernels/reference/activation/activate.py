"""Activations of MLPs other than SwiGLU, with and without a gate."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def activate(x: Tensor, activation: str, *, gated: bool) -> Tensor:
    """Returns silu, gelu or gelu_tanh of x [num_tokens, size]; if `gated`, of its first half, times the second."""
    if gated:
        gate, up = x.chunk(2, dim=-1)
        return _activated(gate, activation).mul_(up)
    return _activated(x, activation)


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
