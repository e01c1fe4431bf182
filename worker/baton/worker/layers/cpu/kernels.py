"""PyTorch's ops around linears on a CPU, as they are or so that a row's bits do not depend on other rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baton.kernels.table import Case, find

# PyTorch splits element-wise ops of more values over threads, and rounds the ends of their parts in another way.
_MAX_VALUES = (1 << 15) - 1
_VECTOR = 16  # values that it computes at once; rows of other widths end with some that are computed one by one


class CpuKernels:
    """Implements Kernels."""

    rms_norm = staticmethod(find("rms_norm", Case("cpu")).load())
    layer_norm = staticmethod(find("layer_norm", Case("cpu")).load())
    activate = staticmethod(find("activate", Case("cpu")).load())
    silu_mul = staticmethod(find("silu_mul", Case("cpu")).load())
    route = staticmethod(find("route", Case("cpu")).load())


class InvariantKernels(CpuKernels):
    """Implements Kernels. A row's activation does not depend on other rows, bit for bit."""

    def activate(self, x: Tensor, activation: str, *, gated: bool) -> Tensor:
        """Returns activation(x); `gated`: activation(first half) * second half."""
        return _by_parts(lambda part: CpuKernels.activate(part, activation, gated=gated), x)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Returns silu(first half) * second half of gate_up [num_tokens, 2 size]."""
        return _by_parts(CpuKernels.silu_mul, gate_up)


def _by_parts(op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns the op of x [num_rows, width], of some rows at a time."""
    width = x.shape[1]
    step = 1 if width % (2 * _VECTOR) else max(1, _MAX_VALUES // width)
    if step >= len(x):
        return op(x)
    return torch.cat([op(x[start : start + step]) for start in range(0, len(x), step)])
