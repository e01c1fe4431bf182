"""A linear in fp32, of fp32 weights and inputs of any dtype."""

from __future__ import annotations

from torch import Tensor


def multiply_wide(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x weight^T [num_tokens, num_rows] in fp32, for x [num_tokens, size] and weight [num_rows, size] fp32."""
    return x.float() @ weight.t()
