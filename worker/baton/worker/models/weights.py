"""The weights of a decoder, as a tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from baton.worker.layers.attention import AttentionWeights
from baton.worker.layers.experts import ExpertsWeights
from baton.worker.layers.join import JoinWeights
from baton.worker.layers.latent_attention import LatentWeights
from baton.worker.layers.linear import LinearWeights
from baton.worker.layers.mlp import MlpWeights
from baton.worker.layers.recurrent import StateWeights
from baton.worker.layers.table import Table
from baton.worker.layers.tree import mapped, tensors_of


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention: AttentionWeights | LatentWeights | StateWeights
    mlp: MlpWeights | ExpertsWeights | None  # None: the layer has none


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """A linear of the pooler."""

    linear: LinearWeights
    norm: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embed: Table  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    norm: Tensor | None  # [hidden_size]; all norms of a model with biases are [2, hidden_size]: weights, biases
    lm_head: LinearWeights  # [vocab_size, hidden_size]; shares the memory of `embed` if tied
    positions: Tensor | None = None  # [max_position_embeddings, hidden_size]
    dense: tuple[DenseWeights, ...] = ()  # of the pooler, in its order
    token_types: Tensor | None = None  # [num_token_types, hidden_size]
    embed_norm: Tensor | None = None  # [hidden_size]
    join: JoinWeights | None = None  # of an MTP layer

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Returns each tensor once, in an order that is the same for all models of one architecture."""
        return tensors_of(self)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ModelWeights:
        """Returns weights with `change` applied to each tensor, once to a shared one."""
        return mapped(self, change)
