"""Measures how evenly a benchmark's random routers spread the tokens of warm-up prompts over experts, by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from baton.kernels.routing import RouterSpec

_MANY = 1024  # tokens of a counted step, because fewer cannot reach all experts


@dataclass(slots=True)
class ExpertHits:
    """The experts chosen in whole steps."""

    counting: bool = False
    counts: list[Tensor] = field(default_factory=list)  # [num_experts] per layer and step, on the device

    def __str__(self) -> str:
        if not self.counts:
            return "no step had enough tokens to count experts"
        counts = torch.stack(self.counts).float()
        shares = counts / counts.mean(-1, keepdim=True)
        hit = (counts > 0).sum(-1)
        return (
            f"experts hit a layer: {int(hit.min())} to {int(hit.max())} of {counts.shape[-1]}; the most loaded has "
            f"{shares.max(-1).values.mean():.2f} of the mean, the least {shares.min(-1).values.mean():.2f}"
        )


@contextmanager
def watched(executor: str) -> Iterator[ExpertHits]:
    """Counts the experts that the GPU's router chooses in steps without graphs, while `counting` is true."""
    hits = ExpertHits()
    if executor != "cuda":
        yield hits
        return
    from baton.worker.layers.cuda.base import CudaKernels

    choose = CudaKernels.route

    def counted(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> Any:
        weights, ids = choose(logits, bias, spec)
        if hits.counting and len(logits) >= _MANY and not torch.cuda.is_current_stream_capturing():
            hits.counts.append(torch.bincount(ids.flatten(), minlength=spec.num_experts))
        return weights, ids

    CudaKernels.route = staticmethod(counted)  # type: ignore[method-assign]
    try:
        yield hits
    finally:
        CudaKernels.route = staticmethod(choose)  # type: ignore[method-assign]
