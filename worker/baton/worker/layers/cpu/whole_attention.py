"""Computes one layer's bidirectional attention on a CPU with PyTorch's ops: RoPE, then attention in whole prompts."""

from __future__ import annotations

from torch import Tensor

from baton.kernels.reference.attention.whole_attention import whole_attention
from baton.kernels.reference.rope.rope_cache import normed_and_rotated, rotation
from baton.worker.layers.cpu.step import WholeInputs
from baton.worker.layers.relative import distance_buckets
from baton.worker.layers.rope_config import NO_ROPE
from baton.worker.layers.spec import AttentionSpec
from baton.worker.quantization.neighbours import Norm


class CpuWholeAttention:
    """Implements AttentionOps without a cache: `write` returns the heads of queries, keys and values."""

    def __init__(
        self, spec: AttentionSpec, cos_sin: Tensor, q_norm: Norm | None, k_norm: Norm | None, relative: Tensor | None
    ) -> None:
        assert not spec.sinks, "no family without a cache has them"
        assert not spec.soft_cap, "no family without a cache has one"
        self._spec = spec
        self._cos_sin = cos_sin
        self._relative = relative
        self._buckets = None if relative is None else distance_buckets(spec.relative_buckets, len(cos_sin))
        self._q_norm, self._k_norm = (None if norm is None else norm.weight for norm in (q_norm, k_norm))
        self._eps = 0.0 if q_norm is None else q_norm.eps

    def write(self, qkv: Tensor, step: WholeInputs) -> Tensor:
        """Rotates queries and keys in place. Returns [num_tokens, num_qkv_heads, head_dim]."""
        spec = self._spec
        heads = qkv.view(-1, spec.num_qkv_heads, spec.head_dim)
        if spec.rope.kind != NO_ROPE or self._q_norm is not None:
            cos, sin = self._rotation(step)
            heads[:, : spec.num_q_heads + spec.num_kv_heads] = normed_and_rotated(
                heads,
                cos,
                sin,
                spec.num_q_heads,
                spec.num_kv_heads,
                self._q_norm,
                self._k_norm,
                self._eps,
                spec.rope.interleaved,
            )
        return heads

    def attend(self, query: Tensor, step: WholeInputs, out: Tensor | None) -> Tensor:
        """Returns the attention of the heads that `write` returned. Ignores `out`."""
        assert out is None
        spec = self._spec
        return whole_attention(
            query,
            step.runs,
            spec.num_kv_heads,
            spec.scale,
            spec.window,
            relative=self._relative,
            buckets=self._buckets,
        )

    def _rotation(self, step: WholeInputs) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines of the step's positions. Layers with the same RoPE share them."""
        key = id(self._cos_sin)
        if key not in step.rotations:
            rope = self._spec.rope
            step.rotations[key] = rotation(self._cos_sin, step.positions, rope.rotary_dim, rope.interleaved)
        return step.rotations[key]
