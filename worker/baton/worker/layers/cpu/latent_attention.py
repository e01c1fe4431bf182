"""Computes one layer's multi-head latent attention on a CPU with PyTorch's ops."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.reference.attention.aligned_attention import AlignedPlan
from baton.kernels.reference.attention.aligned_latents import (
    AbsorbedHeads,
    attend_latents_aligned,
    attend_latents_alone,
)
from baton.kernels.reference.attention.latent_attention import (
    attend_latents_decode,
    attend_latents_prefill,
    write_latents,
)
from baton.kernels.reference.attention.paged_attention import DecodePlan, PrefillPlan
from baton.kernels.reference.rope.rope_cache import rotate, rotation
from baton.worker.layers.cpu.step import StepInputs, View
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.rope_config import NO_ROPE
from baton.worker.quantization.neighbours import Kernels, Norm


class CpuLatentAttention:
    """Implements LatentOps over cache [num_blocks, 1, 1, block_size, kv_rank + rope_dim]."""

    def __init__(
        self,
        cache: Tensor,
        spec: LatentSpec,
        cos_sin: Tensor,
        kv_norm: Norm,
        kv_b: Tensor,
        kernels: Kernels,
        group: int = 0,  # of the KV
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._view = View(group, 0)
        self._cache = cache
        self._spec = spec
        self._cos_sin = cos_sin
        self._kv_norm = kv_norm
        self._kv_b = kv_b.view(spec.num_q_heads, -1, spec.kv_rank)
        self._kernels = kernels
        self._heads = AbsorbedHeads(self._kv_b, spec.nope_dim) if batch_invariant else None

    def write(self, query: Tensor, latent: Tensor, step: StepInputs) -> Tensor:
        """Stores the latents. Returns the queries, rotated where there is RoPE, [num_tokens, num_q_heads, qk_dim]."""
        spec = self._spec
        heads = query.view(-1, spec.num_q_heads, spec.qk_dim)
        normed = self._kv_norm.apply(latent[:, : spec.kv_rank].contiguous(), self._kernels)
        key = latent[:, spec.kv_rank :]
        if spec.rope.kind != NO_ROPE:
            cos, sin = self._rotation(step)
            rotated = heads[..., spec.nope_dim :]
            rotated.copy_(rotate(rotated, cos, sin, spec.rope.interleaved))
            key = rotate(key[:, None], cos, sin, spec.rope.interleaved)[:, 0]
        stored = torch.cat((normed, key), 1)
        write_latents(self._cache, step.block_ids[self._view.group], step.offsets, stored)
        return heads

    def attend(self, query: Tensor, step: StepInputs, out: Tensor | None) -> Tensor:
        """Returns the attention of the queries that `write` returned. Ignores `out`."""
        assert out is None
        spec, view = self._spec, self._view
        attended = query.new_empty(len(query), spec.num_q_heads, spec.value_dim)
        for group in step.decodes:
            mine = slice(group.num_tokens) if group.tokens is None else group.tokens
            attended[mine] = self._attend_alone(query[mine], group.plans[view])
        for chunk in step.prefills:
            part = slice(chunk.start, chunk.stop)
            attended[part] = self._attend_chunk(query[part], chunk.plans[view])
        return attended.view(len(query), -1)

    def _attend_alone(self, query: Tensor, plan: DecodePlan) -> Tensor:
        if self._heads is not None:
            return attend_latents_alone(query, self._cache, plan, self._heads, self._spec.scale)
        return attend_latents_decode(query, self._cache, plan, self._kv_b, self._spec.scale)

    def _attend_chunk(self, query: Tensor, plan: PrefillPlan | AlignedPlan) -> Tensor:
        if isinstance(plan, AlignedPlan):
            assert self._heads is not None, "steps are aligned for batch-invariant devices"
            return attend_latents_aligned(query, self._cache, plan, self._heads, self._spec.scale)
        return attend_latents_prefill(query, self._cache, plan, self._kv_b, self._spec.scale)

    def _rotation(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines of the step's positions. Layers with the same RoPE share them."""
        key = id(self._cos_sin)
        if key not in step.rotations:
            step.rotations[key] = rotation(self._cos_sin, step.positions, 0, self._spec.rope.interleaved)
        return step.rotations[key]
