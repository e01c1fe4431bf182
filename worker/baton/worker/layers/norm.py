"""Norms: how their weights are kept."""

from __future__ import annotations

from torch import Tensor

from baton.worker.layers.spec import NormSpec
from baton.worker.quantization.neighbours import Norm


def norm_of(weights: Tensor | None, spec: NormSpec) -> Norm | None:
    """Returns the norm with these weights, if there is one. With biases, `weights` holds weights and biases."""
    if weights is None:
        return None
    weight, bias = weights.unbind() if spec.bias else (weights, None)
    return Norm(weight, spec.eps, bias, spec.centered)
