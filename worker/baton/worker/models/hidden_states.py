"""The hidden states that a step leaves between layers, for proposers that read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HiddenStates:
    """Collects what some layers read, as one step computes it."""

    def __init__(self, layers: Sequence[int]) -> None:
        """`layers`: their numbers; the number of layers: what the final norm reads."""
        self.layers = frozenset(layers)
        self._found: dict[int, Tensor] = {}

    def take(self, layer: int, residual: Tensor) -> None:
        """Copies the residual stream [num_tokens, hidden_size] before a layer."""
        self._found[layer] = residual.clone()

    def joined(self) -> Tensor:
        """Returns those of all layers, lowest first, [num_tokens, len(layers) * hidden_size]."""
        return torch.cat([self._found[layer] for layer in sorted(self._found)], dim=1)
