"""Computes one layer's attention on a CPU with PyTorch's ops: RoPE, writing K and V, and paged attention."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.reference.attention.aligned_attention import AlignedPlan, attend_aligned
from baton.kernels.reference.attention.paged_attention import PrefillPlan, attend_decode, attend_prefill
from baton.kernels.reference.kv.quantization import quantize_kv
from baton.kernels.reference.rope.rope_cache import normed_and_rotated, rotation, write_kv
from baton.worker.layers.cpu.kv import PagedKv
from baton.worker.layers.cpu.step import StepInputs, View
from baton.worker.layers.rope_config import NO_ROPE
from baton.worker.layers.spec import AttentionSpec
from baton.worker.quantization.neighbours import Norm


class CpuAttention:
    """Implements AttentionOps for layer `index`."""

    def __init__(
        self,
        index: int,
        kv: PagedKv,
        spec: AttentionSpec,
        cos_sin: Tensor,
        query_scale: Tensor | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
        sinks: Tensor | None,
    ) -> None:
        self._view = View(kv.group_of(index), spec.window)
        self._query_scale = query_scale  # [max_model_len] fp32
        self._index, self._kv = index, kv
        self._spec = spec
        self._sinks = sinks
        self._cos_sin = cos_sin
        self._q_norm, self._k_norm = (None if norm is None else norm.weight for norm in (q_norm, k_norm))
        self._eps = 0.0 if q_norm is None else q_norm.eps
        self._rotates = spec.rope.kind != NO_ROPE or q_norm is not None

    def write(self, qkv: Tensor, step: StepInputs) -> Tensor:
        """Stores keys and values. Returns the rotated queries, [num_tokens, num_q_heads, head_dim]."""
        spec = self._spec
        num_q, num_kv = spec.num_q_heads, spec.num_kv_heads
        heads = qkv.view(-1, spec.num_qkv_heads, spec.head_dim)
        queries = heads[:, :num_q]
        if self._rotates:
            cos, sin = self._rotation(step)
            rotated = normed_and_rotated(
                heads, cos, sin, num_q, num_kv, self._q_norm, self._k_norm, self._eps, spec.rope.interleaved
            )
            # Rotated keys are copied back next to the values, so that one op writes both.
            heads[:, num_q : num_q + num_kv] = rotated[:, num_q:]
            queries = rotated[:, :num_q]
        keys_values = heads[:, num_q:].view(-1, 2, num_kv, spec.head_dim)
        self._store(keys_values, step)
        if self._query_scale is None:
            return queries
        return (queries * self._query_scale.index_select(0, step.positions).view(-1, 1, 1)).to(queries.dtype)

    def _store(self, keys_values: Tensor, step: StepInputs) -> None:
        """Writes keys and values [num_tokens, 2, num_kv_heads, head_dim], in 8 bits if they have scales."""
        kv, index = self._kv, self._index
        if kv.meter is not None:
            kv.meter.observe(index, keys_values)
        cache, scale = kv.cache[index], kv.scale_of(index)
        if scale is not None:  # as bytes, which all versions of PyTorch can index
            keys_values, cache = quantize_kv(keys_values, scale).view(torch.uint8), cache.view(torch.uint8)
        write_kv(cache, step.block_ids[self._view.group], step.offsets, keys_values)

    def attend(self, query: Tensor, step: StepInputs, out: Tensor | None) -> Tensor:
        """Returns the attention of the queries that `write` returned. Ignores `out`."""
        assert out is None
        cache, view = self._kv.cache[self._index], self._view
        scores = (self._spec.scale, self._spec.soft_cap, self._sinks, self._kv.scale_of(self._index))
        num_tokens = query.shape[0]
        if len(step.decodes) == 1 and not step.prefills:
            return attend_decode(query, cache, step.decodes[0].plans[view], *scores).view(num_tokens, -1)
        if len(step.prefills) == 1 and not step.decodes:
            return _attend_chunk(query, cache, step.prefills[0].plans[view], *scores).view(num_tokens, -1)
        attended = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in step.decodes:
            mine = slice(group.num_tokens) if group.tokens is None else group.tokens
            attended[mine] = attend_decode(query[mine], cache, group.plans[view], *scores)
        for chunk in step.prefills:
            part = slice(chunk.start, chunk.stop)
            attended[part] = _attend_chunk(query[part], cache, chunk.plans[view], *scores)
        return attended.view(num_tokens, -1)

    def _rotation(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines of the step's positions. Layers with the same RoPE share them."""
        key = id(self._cos_sin)
        if key not in step.rotations:
            rope = self._spec.rope
            step.rotations[key] = rotation(self._cos_sin, step.positions, rope.rotary_dim, rope.interleaved)
        return step.rotations[key]


def _attend_chunk(
    query: Tensor,
    cache: Tensor,
    plan: PrefillPlan | AlignedPlan,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None,
    kv_scale: Tensor | None,
) -> Tensor:
    if isinstance(plan, AlignedPlan):
        assert not soft_cap, "refused at start"
        assert sinks is None, "refused at start"
        return attend_aligned(query, cache, plan, scale, kv_scale)
    return attend_prefill(query, cache, plan, scale, soft_cap, sinks, kv_scale)
