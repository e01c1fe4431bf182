"""Latent attention on a GPU: the state that all layers share, and the ops of one layer. Never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.kernels.attention.latent_cuts import LatentCuts
from baton.kernels.attention.latent_decode import LatentWorkspace, cut_latents, latent_decode_attention
from baton.kernels.attention.latent_passes import LatentTiles, plan_latent_tiles
from baton.kernels.attention.latent_prefill import latent_prefill_attention
from baton.kernels.rope.latent_cache import latent_rope_and_cache
from baton.worker.layers.cuda.paged import Cuts
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.quantization.neighbours import Norm

# Keys and values that are made at once for prompts. A card computes products of so many rows at full speed.
_MADE_BYTES = 1 << 28


class PagedLatents:
    """Holds the cached vectors, block tables and scratch memory of one rank. Implements PagedCache.

    `places`: the KV group of each layer, and the layer of the cache that it is in.
    """

    def __init__(
        self,
        spec: LatentSpec,
        cache: Tensor,
        tables: Sequence[Tensor],
        max_seqs: int,
        dtype: torch.dtype,
        places: Sequence[tuple[int, int]],
    ) -> None:
        device = cache.device
        self.cache = cache  # [num_layers, num_blocks, 1, 1, block_size, kv_rank + rope_dim]
        self.tables = tuple(tables)  # [num_rows, max_blocks] of each group
        self.places = places
        self.max_seqs = max_seqs
        self.dtype = dtype
        self.workspace = LatentWorkspace(max_seqs, spec.num_q_heads, spec.kv_rank, device)
        self.most_keys = max(1, _MADE_BYTES // (spec.up_size * dtype.itemsize))
        self._num_heads, self._kv_rank = spec.num_q_heads, spec.kv_rank
        self._device = device

    def reset(self) -> None:
        """Does nothing: launches share no counters."""

    def tiles(self, chunk_lens: list[int], prefix_lens: list[int]) -> LatentTiles:
        """Returns the tiles of chunks that follow cached prefixes, and the passes over their keys."""
        return plan_latent_tiles(chunk_lens, prefix_lens, self.most_keys, self._device)

    def cut(self, seq_lens: Tensor) -> dict[int, list[Cuts]]:
        """Returns the cuts of decoding sequences, one item for each `max_seqs` sequences, under 0: no window."""
        parts = seq_lens.split(self.max_seqs) if len(seq_lens) else ()  # type: ignore[no-untyped-call]
        return {0: [cut_latents(part, self._num_heads, self._kv_rank, self.cache[0]) for part in parts]}


class CudaLatentAttention:
    """Implements LatentOps for layer `index`."""

    def __init__(
        self, index: int, spec: LatentSpec, shared: PagedLatents, cos_sin: Tensor, kv_norm: Norm, kv_b: Tensor
    ) -> None:
        self.spec = spec
        self._shared = shared
        self._group, self._place = shared.places[index]
        self._cos_sin = cos_sin  # [max_model_len, rope_dim] fp32
        self._kv_norm = kv_norm
        self._kv_b = kv_b.view(spec.num_q_heads, -1, spec.kv_rank)

    def write(self, query: Tensor, latent: Tensor, step: StepInputs) -> Tensor:
        """Rotates the queries in place, writes what is cached, and returns the queries."""
        shared, spec = self._shared, self.spec
        latent_rope_and_cache(
            query,
            latent,
            shared.cache[self._place],
            step.positions,
            step.slots(self._group),
            self._cos_sin,
            self._kv_norm.weight,
            num_heads=spec.num_q_heads,
            eps=self._kv_norm.eps,
            interleaved=spec.rope.interleaved,
        )
        return query

    def attend(self, query: Tensor, step: StepInputs, out: Tensor | None) -> Tensor:
        """Returns the attention output. `query` is the result of `write`."""
        spec, most = self.spec, self._shared.max_seqs
        if out is None:
            out = torch.empty(len(query), spec.attended_size, dtype=query.dtype, device=query.device)
        query = query.unflatten(1, (spec.num_q_heads, spec.qk_dim))  # type: ignore[no-untyped-call]
        heads = out.view(len(query), spec.num_q_heads, spec.value_dim)
        # A step that recomputes generated tokens may have more decodes than `max_seqs`.
        for first in range(0, step.num_decodes, most):
            self.decode(query, heads, step, first, min(first + most, step.num_decodes))
        if step.tiles is not None:
            assert isinstance(step.tiles, LatentTiles), "the cache has made them"
            self.prefill(query, heads, step, step.tiles)
        return out

    def decode(self, query: Tensor, out: Tensor, step: StepInputs, first: int, last: int) -> None:
        """Computes the attention of decoding sequences `first` to `last`, one token each."""
        shared, nope_dim = self._shared, self.spec.nope_dim
        mine = query[first:last]
        lifted = torch.bmm(mine[..., :nope_dim].transpose(0, 1), self._kv_b[:, :nope_dim])
        cuts = step.cuts[0][first // shared.max_seqs]
        assert isinstance(cuts, LatentCuts), "the cache has made them"
        summed = latent_decode_attention(
            lifted.transpose(0, 1),
            mine[..., nope_dim:],
            shared.cache[self._place],
            shared.tables[self._group],
            step.rows[first:last],
            cuts,
            self.spec.scale,
            shared.workspace,
        )
        values = self._kv_b[:, nope_dim:].transpose(1, 2)
        torch.bmm(summed.transpose(0, 1), values, out=out[first:last].transpose(0, 1))

    def prefill(self, query: Tensor, out: Tensor, step: StepInputs, tiles: LatentTiles) -> None:
        """Computes the attention of the chunks, which follow the decodes."""
        # query_start_loc counts the decodes' tokens too, so the chunks' offsets need no change.
        decodes, shared = step.num_decodes, self._shared
        latent_prefill_attention(
            query,
            shared.cache[self._place],
            shared.tables[self._group],
            step.rows[decodes:],
            step.seq_lens[decodes:],
            step.query_start_loc[decodes:],
            tiles,
            self._kv_b,
            self.spec.scale,
            out=out,
        )
