"""The interface of a device to a decoder: kernels, linears, and attention over the device's KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.spec import AttentionSpec
from baton.worker.layers.state_spec import StateSpec
from baton.worker.layers.table import Table
from baton.worker.quantization.base import LinearOps, QuantMethod
from baton.worker.quantization.experts import ExpertsMethod, ExpertsOps
from baton.worker.quantization.neighbours import Kernels, Norm

S_contra = TypeVar("S_contra", contravariant=True)  # the inputs of a step, prepared by the device's executor


class AttentionOps(Protocol[S_contra]):
    """The attention of one layer."""

    def write(self, qkv: Tensor, step: S_contra) -> Tensor:
        """Rotates the queries and keys of qkv [num_tokens, (q + 2 kv heads) * head_dim], which it may overwrite, and
        stores keys and values. Returns the queries for `attend`."""

    def attend(self, query: Tensor, step: S_contra, out: Tensor | None) -> Tensor:
        """Returns the attention of the queries over the cache, [num_tokens, q heads * head_dim], in `out` if given."""


class LatentOps(Protocol[S_contra]):
    """The multi-head latent attention of one layer."""

    def write(self, query: Tensor, latent: Tensor, step: S_contra) -> Tensor:
        """Rotates the queries [num_tokens, q heads * (nope_dim + rope_dim)], which it may overwrite, norms and rotates
        latent [num_tokens, kv_rank + rope_dim], and stores it. Rows may be apart. Returns queries for `attend`."""

    def attend(self, query: Tensor, step: S_contra, out: Tensor | None) -> Tensor:
        """Returns the attention of the queries over the cache, [num_tokens, q heads * value_dim], in `out` if given."""


@dataclass(frozen=True, slots=True)
class StateTensors:
    """The weights of a layer with states that belong to no linear."""

    conv: Tensor  # [channels, kernel_size]
    conv_bias: Tensor | None  # [channels]
    log_rate: Tensor | None  # [num_heads] fp32: `A_log` of checkpoints
    bias: Tensor | None  # [num_heads or num_heads * key_dim] fp32: `dt_bias` of checkpoints
    skip: Tensor | None  # [num_heads] fp32: `D` of checkpoints
    norm: Tensor | None  # of the gated norm


class StateOps(Protocol[S_contra]):
    """What one layer with states computes between its linears."""

    def mix(self, projected: Tensor, step: S_contra) -> Tensor:
        """Returns [num_tokens, attended_size] of projected [num_tokens, projected_size]. Replaces the states."""


class Device(Protocol[S_contra]):
    """A device that runs a decoder."""

    @property
    def kernels(self) -> Kernels:
        """The kernels of norms and activations."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of queries, keys and values for attention."""

    def inputs(self, step: S_contra) -> tuple[Tensor, Tensor]:
        """Returns the step's token ids and positions, [num_tokens] int64."""

    def linear_ops(self, method: QuantMethod, name: str = "") -> LinearOps:
        """Returns the ops of a linear of a weight format. `name`: of its first part, where linears differ in more."""

    def experts_ops(self, method: ExpertsMethod, name: str = "") -> ExpertsOps:
        """Returns the ops of a layer's experts in a weight format. `name`: the prefix of the layer's names."""

    def taken(self, table: Table, ids: Tensor) -> Tensor:
        """Returns rows of a table, [num_ids, columns]."""

    def embed(self, table: Table, step: S_contra) -> Tensor:
        """Returns the rows of `table` [vocab_size, hidden_size] for the step's tokens."""

    def embed_positions(self, table: Tensor, step: S_contra) -> Tensor:
        """Returns the rows of `table` [max_position, hidden_size] for the step's positions."""

    def attention(
        self,
        index: int,
        spec: AttentionSpec,
        q_norm: Norm | None,
        k_norm: Norm | None,
        sinks: Tensor | None,
        relative: Tensor | None = None,
    ) -> AttentionOps[S_contra]:
        """Returns the ops of layer `index`. `q_norm` and `k_norm` apply to single heads; sinks [num_q_heads];
        relative [relative_buckets, num_q_heads]."""

    def latent_attention(self, index: int, spec: LatentSpec, kv_norm: Norm, kv_b: Tensor) -> LatentOps[S_contra]:
        """Returns the ops of layer `index`. kv_b [num_q_heads * (nope_dim + value_dim), kv_rank]."""

    def recurrence(self, index: int, spec: StateSpec, tensors: StateTensors) -> StateOps[S_contra]:
        """Returns the ops of layer `index`."""
