"""Activations of MLPs other than SwiGLU, with and without a gate."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def activate(x: Tensor, activation: str, *, gated: bool) -> Tensor:
    """Returns silu, gelu, gelu_tanh or relu2 (squared ReLU) of x [num_tokens, size].

    If `gated`, of its first half, times the second.
    """
    if gated:
        gate, up = x.chunk(2, dim=-1)
        return _activated(gate, activation).mul_(up)
    return _activated(x, activation)


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return functional.silu(x)
    if activation == "relu2":
        return functional.relu(x).square_()
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
