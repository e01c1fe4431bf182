"""Paged attention on a GPU: the state that all layers share, and the ops of one layer. Never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from baton.kernels.attention.decode import DecodeWorkspace, cut_for_decode, decode_attention
from baton.kernels.attention.decode_cuts import DecodeCuts
from baton.kernels.attention.prefill import TILE_ROWS, PrefillTiles, make_tiles
from baton.kernels.rope.rope_cache import rope_and_cache
from baton.kernels.table import HOPPER_PREFILL, Case, Row, find
from baton.worker.layers.cuda.paged import Cuts
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.layers.kv_scale_meter import KvScaleMeter
from baton.worker.layers.spec import AttentionSpec
from baton.worker.quantization.neighbours import Norm

if TYPE_CHECKING:
    from baton.kernels.attention.prefill_hopper import PrefillWorkspace


class PagedAttention:
    """Holds the KV cache, block tables and scratch memory of one rank. All layers have heads of the same shape.

    `batch_invariant`: a token's result is bit-identical, whatever else the step computes. `places`: the KV group of
    each layer, and the layer of the cache that it is in; None: all are in one group, in order.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        windows: tuple[int, ...],
        cache: Tensor,
        block_table: Tensor,
        max_seqs: int,
        dtype: torch.dtype,
        *,
        kv_scale: Tensor | None = None,
        batch_invariant: bool = False,
        more_tables: Sequence[Tensor] = (),
        places: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        device = cache.device
        self.cache = cache  # [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]
        self.tables = (block_table, *more_tables)  # [num_rows, max_blocks] of each group
        self.places = [(0, layer) for layer in range(len(windows))] if places is None else places
        self.windows = windows  # of the layers
        self.max_seqs = max_seqs
        self.dtype = dtype  # of queries
        self._invariant = batch_invariant
        # Read here, because a sleeping cache has no shape.
        *_, self._block_size, self._head_dim = cache.shape
        # [2, num_kv_heads] fp32 per layer, for a quantized pool. Separate tensors, so that all have the same alignment.
        self.kv_scales = [None if kv_scale is None else kv_scale[layer].clone() for layer in range(len(windows))]
        self.meter: KvScaleMeter | None = None  # while scales are computed
        self.decode_workspace = DecodeWorkspace(
            max_seqs, spec.num_q_heads, spec.num_kv_heads, spec.head_dim, device, batch_invariant=batch_invariant
        )
        # None unless Hopper's prefill kernel is chosen.
        self.prefill_workspace = _prefill_workspace(self.prefill_row(replace(spec, window=0)), cache, spec.num_q_heads)
        self._num_q_heads = spec.num_q_heads
        self._soft_cap, self._sinks = spec.soft_cap, spec.sinks  # of all layers

    def prefill_row(self, spec: AttentionSpec) -> Row:
        """Returns the table's row of the kernel that computes a layer's prefill attention."""
        capability, _ = torch.cuda.get_device_capability(self.cache.device)
        case = Case(
            "cuda",
            capability,
            self.dtype,
            self.cache.dtype,
            self._head_dim,
            self._block_size,
            window=spec.window > 0,
            soft_cap=spec.soft_cap > 0,
            sinks=spec.sinks,
            batch_invariant=self._invariant,
        )
        return find("prefill_attention", case)

    def reset(self) -> None:
        """Zeroes the counters that launches share, after a step that failed midway."""
        self.decode_workspace.arrived.zero_()
        if self.prefill_workspace is not None:
            self.prefill_workspace.arrived.zero_()

    def tiles(self, chunk_lens: list[int], prefix_lens: list[int]) -> PrefillTiles:
        """Returns the tiles of chunks that follow cached prefixes, for StepInputs."""
        num_q_heads = 0 if self.prefill_workspace is None else self._num_q_heads
        return make_tiles(chunk_lens, prefix_lens, TILE_ROWS, self.cache.device, num_q_heads)

    def cut(self, seq_lens: Tensor) -> dict[int, list[Cuts]]:
        """Returns the cuts of decoding sequences by window, one item for each `max_seqs` sequences."""
        parts = seq_lens.split(self.max_seqs) if len(seq_lens) else ()  # type: ignore[no-untyped-call]
        return {
            window: [
                cut_for_decode(
                    part,
                    self.cache,
                    self.dtype,
                    quantized=self.kv_scales[0] is not None,
                    window=window,
                    soft_cap=self._soft_cap,
                    sinks=self._sinks,
                    batch_invariant=self._invariant,
                )
                for part in parts
            ]
            for window in set(self.windows)
        }


class CudaAttention:
    """Implements AttentionOps for layer `index`."""

    def __init__(
        self,
        index: int,
        spec: AttentionSpec,
        shared: PagedAttention,
        cos_sin: Tensor,
        query_scale: Tensor | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
        sinks: Tensor | None,
    ) -> None:
        self.spec = spec
        self._index = index
        self._shared = shared
        self._group, self._place = shared.places[index]
        self._query_scale = query_scale  # [max_model_len] fp32
        self._cos_sin = cos_sin  # [max_model_len, head_dim] fp32
        self._q_norm, self._k_norm = (None if norm is None else norm.weight for norm in (q_norm, k_norm))
        self._eps = 1e-6 if q_norm is None else q_norm.eps
        self._sinks = sinks  # [num_q_heads]
        row = shared.prefill_row(spec)
        self._prefill = row.load()
        if row is HOPPER_PREFILL:
            self._prefill_options: dict[str, Any] = {"workspace": shared.prefill_workspace}
        else:
            self._prefill_options = {
                "kv_scale": shared.kv_scales[index],
                "window": spec.window,
                "soft_cap": spec.soft_cap,
                "sinks": self._sinks,
            }

    def write(self, qkv: Tensor, step: StepInputs) -> Tensor:
        """Rotates the queries of qkv in place, writes K and V into the cache, and returns qkv."""
        shared, index = self._shared, self._index
        if shared.meter is not None:
            shared.meter.measure(index, qkv, partial(self._write, step.positions, None))
        self._write(step.positions, shared.kv_scales[index], qkv, shared.cache[self._place], step.slots(self._group))
        return qkv

    def _write(self, positions: Tensor, kv_scale: Tensor | None, qkv: Tensor, cache: Tensor, slots: Tensor) -> None:
        rope_and_cache(
            qkv,
            cache,
            positions,
            slots,
            self._cos_sin,
            self.spec.num_q_heads,
            q_norm=self._q_norm,
            k_norm=self._k_norm,
            eps=self._eps,
            kv_scale=kv_scale,
            rotary_dim=self.spec.rope.rotary_dim,
            interleaved=self.spec.rope.interleaved,
            query_scale=self._query_scale,
        )

    def attend(self, query: Tensor, step: StepInputs, out: Tensor | None) -> Tensor:
        """Returns the attention output. `query` is the result of `write`, whose rows begin with the queries."""
        spec, most = self.spec, self._shared.max_seqs
        if out is None:
            out = torch.empty(len(query), spec.q_size, dtype=query.dtype, device=query.device)
        query = query[:, : spec.q_size].unflatten(1, (spec.num_q_heads, spec.head_dim))  # type: ignore[no-untyped-call]
        heads = out.view(len(query), spec.num_q_heads, spec.head_dim)
        # A step that recomputes generated tokens may have more decodes than `max_seqs`.
        for first in range(0, step.num_decodes, most):
            self.decode(query, heads, step, first, min(first + most, step.num_decodes))
        if step.tiles is not None:
            assert isinstance(step.tiles, PrefillTiles), "the cache has made them"
            self.prefill(query, heads, step, step.tiles)
        return out

    def decode(self, query: Tensor, out: Tensor, step: StepInputs, first: int, last: int) -> None:
        """Computes the attention of decoding sequences `first` to `last`, one token each."""
        shared = self._shared
        cuts = step.cuts[self.spec.window][first // shared.max_seqs]
        assert isinstance(cuts, DecodeCuts), "the cache has made them"
        decode_attention(
            query[first:last],
            shared.cache[self._place],
            shared.tables[self._group],
            step.rows[first:last],
            cuts,
            self.spec.scale,
            shared.decode_workspace,
            out=out[first:last],
            kv_scale=shared.kv_scales[self._index],
            soft_cap=self.spec.soft_cap,
            sinks=self._sinks,
        )

    def prefill(self, query: Tensor, out: Tensor, step: StepInputs, tiles: PrefillTiles) -> None:
        """Computes the attention of the chunks, which follow the decodes."""
        # query_start_loc counts the decodes' tokens too, so the chunks' offsets need no change.
        decodes, shared = step.num_decodes, self._shared
        self._prefill(
            query,
            shared.cache[self._place],
            shared.tables[self._group],
            step.rows[decodes:],
            step.seq_lens[decodes:],
            step.query_start_loc[decodes:],
            tiles,
            self.spec.scale,
            out=out,
            **self._prefill_options,
        )


def _prefill_workspace(row: Row, cache: Tensor, num_q_heads: int) -> PrefillWorkspace | None:
    if row is not HOPPER_PREFILL:
        return None
    from baton.kernels.attention.prefill_hopper import PrefillWorkspace

    return PrefillWorkspace(num_q_heads, cache.shape[-1], cache.device)
