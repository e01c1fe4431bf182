"""Which weight formats have kernels for products of few rows on a CPU."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from baton.worker.quantization.base import LinearOps, QuantMethod
from baton.worker.quantization.neighbours import Kernels


@runtime_checkable
class FewRows(Protocol):
    """A weight format that may have them."""

    def on_bfloat16(self, kernels: Kernels) -> LinearOps:
        """Returns ops for a CPU with such kernels for bfloat16."""


def cpu_ops(method: QuantMethod, kernels: Kernels, dtype: torch.dtype) -> LinearOps:
    """Returns a format's ops on this machine's CPU, for activations of a dtype."""
    fast = dtype is torch.bfloat16 and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return method.on_bfloat16(kernels) if fast and isinstance(method, FewRows) else method.on_cpu(kernels)
