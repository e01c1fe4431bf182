"""PyTorch's ops around linears on a CPU, as they are or so that a row's bits do not depend on other rows."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.reference.activation.parts import by_parts, parts_of
from baton.kernels.routing import RouterSpec
from baton.kernels.table import Case, find


class CpuKernels:
    """Implements Kernels."""

    rms_norm = staticmethod(find("rms_norm", Case("cpu")).load())
    layer_norm = staticmethod(find("layer_norm", Case("cpu")).load())
    activate = staticmethod(find("activate", Case("cpu")).load())
    silu_mul = staticmethod(find("silu_mul", Case("cpu")).load())
    sigmoid = staticmethod(torch.sigmoid_)
    route = staticmethod(find("route", Case("cpu")).load())


class InvariantKernels(CpuKernels):
    """Implements Kernels. A row's activation and its experts do not depend on other rows, bit for bit."""

    def activate(self, x: Tensor, activation: str, *, gated: bool) -> Tensor:
        """Returns activation(x); `gated`: activation(first half) * second half."""
        return by_parts(lambda part: CpuKernels.activate(part, activation, gated=gated), x)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Returns silu(first half) * second half of gate_up [num_tokens, 2 size]."""
        return by_parts(CpuKernels.silu_mul, gate_up)

    def sigmoid(self, x: Tensor) -> Tensor:
        """Returns the sigmoid of x."""
        # In fp64, because PyTorch rounds a function's last bit by the place of an element in its tensor.
        return torch.sigmoid(x.double()).to(x.dtype)

    def route(self, logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
        """Returns weights [num_tokens, top_k] fp32 and ids of the experts that tokens choose."""
        found = [CpuKernels.route(part, bias, spec) for part in parts_of(logits)]
        weights, ids = zip(*found, strict=True)
        return torch.cat(weights), torch.cat(ids)
