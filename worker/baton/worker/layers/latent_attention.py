"""The attention half of a layer with multi-head latent attention: its weights, and the order of its ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from baton.worker.layers.device import Device
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.linear import Linear, LinearWeights, OutputLinear
from baton.worker.layers.norm import norm_of
from baton.worker.layers.spec import NormSpec
from baton.worker.quantization.neighbours import Norm, Stream

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The weights of one layer's attention. Names without "_norm" are those of checkpoints."""

    input_norm: Tensor | None  # [hidden_size]
    qkv_a: LinearWeights  # [q_rank or q size, then kv_rank + rope_dim; hidden_size]: queries, then what is cached
    q_a_norm: Tensor | None  # [q_rank]
    q_b: LinearWeights | None  # [num_q_heads * (nope_dim + rope_dim), q_rank]
    kv_a_norm: Tensor  # [kv_rank]
    kv_b: Tensor  # [num_q_heads * (nope_dim + value_dim), kv_rank], of a head its keys, then its values
    o: LinearWeights  # [hidden_size, num_q_heads * value_dim]
    output_norm: Tensor | None  # [hidden_size]


class LatentAttention(Generic[S]):
    """norm -> low-rank q and kv -> norms -> q -> RoPE -> cache -> attention -> o -> norm -> residual stream"""

    attend_writes: ClassVar[bool] = False  # `project` writes the cache

    def __init__(
        self,
        index: int,
        spec: LatentSpec,
        weights: LatentWeights,
        norm: NormSpec,
        scale: float,
        device: Device[S],
        *,
        norms_sum: bool = False,
    ) -> None:
        self._kernels = device.kernels
        self._q_width = spec.down_sizes[0]
        self._input_norm = norm_of(weights.input_norm, norm)
        self._qkv_a = Linear(weights.qkv_a, device)
        self._q_a_norm = None if weights.q_a_norm is None else Norm(weights.q_a_norm, spec.norm_eps)
        self._q_b = None if weights.q_b is None else Linear(weights.q_b, device)
        kv_a_norm = Norm(weights.kv_a_norm, spec.norm_eps)
        self._ops = device.latent_attention(index, spec, kv_a_norm, weights.kv_b)
        self._o = OutputLinear(weights.o, norm_of(weights.output_norm, norm), scale, device, norms_sum=norms_sum)

    def project(self, stream: Stream, step: S, out: Tensor | None) -> Tensor:
        """Stores what is cached of the step's tokens. Returns the queries for `attend`, in `out` if given."""
        made = self._qkv_a.project(stream, self._input_norm)
        query, latent = made[:, : self._q_width], made[:, self._q_width :]
        if self._q_b is not None:
            assert self._q_a_norm is not None, "low-rank queries are normed"
            query = self._q_b.project(Stream(self._q_a_norm.apply(query.contiguous(), self._kernels)), None, out)
        elif out is not None:
            query = out.copy_(query)
        return self._ops.write(query, latent, step)

    def attend(self, query: Tensor, step: S, out: Tensor | None) -> Tensor:
        """Returns the attention [num_tokens, num_q_heads * value_dim], in `out` if given."""
        return self._ops.attend(query, step, out)

    def finish(self, stream: Stream, attended: Tensor) -> None:
        """Adds the output projection of `attended` to the stream."""
        self._o.add(attended, stream)
