"""The beginning of an MTP layer: the next token's embedding and a hidden state become one vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.worker.layers.device import Device
from baton.worker.layers.linear import Linear, LinearWeights
from baton.worker.layers.norm import norm_of
from baton.worker.layers.spec import NormSpec


@dataclass(frozen=True, slots=True)
class JoinWeights:
    embed_norm: Tensor  # [hidden_size]
    hidden_norm: Tensor  # [hidden_size]
    linear: LinearWeights  # [hidden_size, 2 hidden_size]: embeddings first


class Join:
    """linear([norm(embedding), norm(hidden state)])  (DeepSeek-V3, section 2.2)"""

    def __init__(self, weights: JoinWeights, norm: NormSpec, device: Device[Any]) -> None:
        self._kernels = device.kernels
        self._embed_norm, self._hidden_norm = norm_of(weights.embed_norm, norm), norm_of(weights.hidden_norm, norm)
        self._linear = Linear(weights.linear, device)

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Returns [num_tokens, hidden_size] of both, which have this shape."""
        assert self._embed_norm is not None
        assert self._hidden_norm is not None
        parts = self._embed_norm.apply(embedded, self._kernels), self._hidden_norm.apply(hidden, self._kernels)
        return self._linear.multiply(torch.cat(parts, 1))
