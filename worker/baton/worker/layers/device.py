"""What a device brings to a decoder: kernels, linears, attention over its KV cache. The decoder knows no more of it."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

from baton.worker.layers.spec import AttentionSpec
from baton.worker.quantization.base import LinearOps, QuantMethod
from baton.worker.quantization.neighbours import Kernels, Norm

S_contra = TypeVar("S_contra", contravariant=True)  # a step's inputs, as the device's executor makes them


class AttentionOps(Protocol[S_contra]):
    """One layer's attention."""

    def write(self, qkv: Tensor, step: S_contra) -> Tensor:
        """Rotates queries and keys of qkv [num_tokens, (q + 2 kv heads) * head_dim], may overwrite it, and stores keys
        and values. Returns what `attend` takes as queries."""

    def attend(self, query: Tensor, step: S_contra, out: Tensor | None) -> Tensor:
        """Returns the attention of the queries over the cache, [num_tokens, q heads * head_dim], in `out` if given."""


class Device(Protocol[S_contra]):
    """Where a decoder runs."""

    @property
    def kernels(self) -> Kernels:
        """Norms and activations."""

    def linear_ops(self, method: QuantMethod) -> LinearOps:
        """Returns the ops that all linears of a weight format share."""

    def embed(self, table: Tensor, step: S_contra) -> Tensor:
        """Returns the rows of `table` [vocab_size, hidden_size] for the step's tokens."""

    def attention(
        self, index: int, spec: AttentionSpec, q_norm: Norm | None, k_norm: Norm | None
    ) -> AttentionOps[S_contra]:
        """Returns the ops of layer `index`. The norms are those of single heads."""
