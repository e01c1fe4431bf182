"""The attention half of a decoder layer: its weights, and the order of its ops on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from baton.worker.layers.device import Device
from baton.worker.layers.linear import Linear, LinearWeights, OutputLinear
from baton.worker.layers.norm import norm_of
from baton.worker.layers.spec import AttentionSpec, NormSpec
from baton.worker.quantization.neighbours import Stream

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The weights of one layer's attention."""

    input_norm: Tensor | None  # [hidden_size]
    qkv: LinearWeights  # [num_qkv_heads * head_dim, hidden_size]: queries, keys, values
    q_norm: Tensor | None  # [head_dim], [num_q_heads, head_dim] or, of the whole projection, [num_q_heads * head_dim]
    k_norm: Tensor | None
    o: LinearWeights  # [hidden_size, num_q_heads * head_dim]
    output_norm: Tensor | None  # [hidden_size]
    sinks: Tensor | None = None  # [num_q_heads]
    relative: Tensor | None = None  # [relative_buckets, num_q_heads], shared by all layers


class Attention(Generic[S]):
    """norm -> q, k, v -> RoPE -> cache -> attention -> o -> norm -> residual stream"""

    attend_writes: ClassVar[bool] = False  # `project` writes the cache

    def __init__(
        self,
        index: int,
        spec: AttentionSpec,
        weights: AttentionWeights,
        norm: NormSpec,
        scale: float,
        device: Device[S],
        *,
        norms_sum: bool = False,
    ) -> None:
        norms = [norm_of(weights.q_norm, norm), norm_of(weights.k_norm, norm)]
        none = [None, None]
        q_norm, k_norm = norms if spec.qk_norm == "head" else none
        self._spec = spec
        self._input_norm = norm_of(weights.input_norm, norm)
        self._qkv = Linear(weights.qkv, device)
        self._kernels = device.kernels
        self._projection_norms = none if spec.qk_norm == "head" else norms
        self._gate: Tensor | None = None  # [num_tokens, num_q_heads * head_dim] of the step that is computed
        self._ops = device.attention(index, spec, q_norm, k_norm, weights.sinks, weights.relative)
        self._o = OutputLinear(weights.o, norm_of(weights.output_norm, norm), scale, device, norms_sum=norms_sum)

    def project(self, stream: Stream, step: S, out: Tensor | None) -> Tensor:
        """Stores the step's keys and values. Returns the queries for `attend`. Projects into `out` if given."""
        qkv = self._qkv.project(stream, self._input_norm, out)
        if self._spec.output_gate:
            qkv = self._take_gate(qkv)
        if self._spec.qkv_clip:
            qkv.clamp_(-self._spec.qkv_clip, self._spec.qkv_clip)
        self._norm_projections(qkv)
        return self._ops.write(qkv, step)

    def attend(self, query: Tensor, step: S, out: Tensor | None) -> Tensor:
        """Returns the attention [num_tokens, num_q_heads * head_dim], in `out` if given."""
        attended = self._ops.attend(query, step, out)
        return attended if self._gate is None else attended.mul_(self._kernels.sigmoid(self._gate))

    def finish(self, stream: Stream, attended: Tensor) -> None:
        """Adds the output projection of `attended` to the stream."""
        self._o.add(attended, stream)

    def _take_gate(self, projected: Tensor) -> Tensor:
        """Keeps the gates for `attend`. Returns queries, keys and values."""
        spec = self._spec
        queries, keys_values = torch.split(projected, [2 * spec.q_size, 2 * spec.kv_size], -1)
        query, gate = queries.view(-1, spec.num_q_heads, 2, spec.head_dim).unbind(2)
        self._gate = gate.flatten(1)
        return torch.cat((query.flatten(1), keys_values), -1)

    def _norm_projections(self, qkv: Tensor) -> None:
        spec, start = self._spec, 0
        for norm, size in zip(self._projection_norms, (spec.q_size, spec.kv_size), strict=True):
            if norm is not None:
                heads = qkv[:, start : start + size]
                rows = heads.contiguous().view(-1, norm.weight.shape[-1])
                heads.copy_(norm.apply(rows, self._kernels).view(heads.shape))
            start += size
