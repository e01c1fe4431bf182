"""Runs the decoder on a GPU with Baton's kernels and cuBLAS. Never waits for the device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

import torch
from torch import Tensor

from baton.rpc.errors import Unsupported
from baton.worker.layers.cuda.attention import CudaAttention, PagedAttention
from baton.worker.layers.cuda.paged_device import PagedDevice
from baton.worker.layers.cuda.recurrence import CudaRecurrence, PagedStates
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.layers.device import StateTensors
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.rope import query_scales
from baton.worker.layers.rope_config import RopeConfig
from baton.worker.layers.spec import AttentionSpec
from baton.worker.layers.state_spec import StateSpec
from baton.worker.quantization.neighbours import Norm

_NO_STATES: Mapping[int, PagedStates] = MappingProxyType({})


class CudaDevice(PagedDevice):
    """Implements baton.worker.layers.device.Device."""

    def __init__(
        self,
        paged: PagedAttention,
        cos_sin: Mapping[RopeConfig, Tensor],
        states: Mapping[int, PagedStates] = _NO_STATES,  # of each group of states
        *,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(paged, cos_sin, batch_invariant=batch_invariant)
        self._states = states
        self.paged = paged
        self._query_scales = {rope: self._query_scale(rope, len(table)) for rope, table in cos_sin.items()}
        self._layers: dict[int, CudaAttention] = {}

    def _query_scale(self, rope: RopeConfig, num_positions: int) -> Tensor | None:
        scales = query_scales(rope, num_positions)
        return None if scales is None else scales.to(self._device)

    def attention(
        self,
        index: int,
        spec: AttentionSpec,
        q_norm: Norm | None,
        k_norm: Norm | None,
        sinks: Tensor | None,
        relative: Tensor | None = None,
    ) -> CudaAttention:
        """Returns layer `index`'s ops."""
        assert relative is None, "no family with a cache has such scores"
        cos_sin = self._cos_sin[spec.rope]
        self._layers[index] = CudaAttention(
            index, spec, self.paged, cos_sin, self._query_scales[spec.rope], q_norm, k_norm, sinks
        )
        return self._layers[index]

    def recurrence(self, index: int, spec: StateSpec, tensors: StateTensors) -> CudaRecurrence:
        """Returns layer `index`'s ops."""
        group, place = self.paged.places[index]
        return CudaRecurrence(spec, tensors, self._states[group], group, place)

    def latent_attention(self, index: int, spec: LatentSpec, kv_norm: Norm, kv_b: Tensor) -> NoReturn:
        """Raises Unsupported: no family has both kinds of attention."""
        raise Unsupported("a model with keys and values of heads has latent attention too", field="model")

    def warm_up(self) -> None:
        """Launches the attention variants that the steps of the warm-up do not use."""
        self._warm_up_decode()
        self._warm_up_cut_prefill()

    def _warm_up_decode(self) -> None:
        """Launches every variant of decode attention that some number of sequences uses."""
        device, paged, most = self._device, self.paged, self.paged.max_seqs
        nothing = torch.zeros(most, dtype=torch.int32, device=device)
        counts = {
            most,
            *(count for power in range(most.bit_length()) for count in (1 << power, 3 << power) if count < most),
        }
        cuts_of = {count: paged.cut(nothing[:count]) for count in sorted(counts)}
        # Filling the query separates the cuts from attention, which reads them before the preceding kernel ends.
        spec = next(iter(self._layers.values())).spec
        qkv = torch.zeros(most, spec.num_qkv_heads * spec.head_dim, dtype=paged.dtype, device=device)
        query = qkv[:, : spec.q_size].unflatten(1, (spec.num_q_heads, spec.head_dim))  # type: ignore[no-untyped-call]
        out = torch.empty(most, spec.num_q_heads, spec.head_dim, dtype=paged.dtype, device=device)
        for count, cuts in cuts_of.items():
            step = StepInputs(nothing, nothing, nothing, nothing, nothing, nothing, count, None, cuts)
            for layer in {layer.spec.window: layer for layer in self._layers.values()}.values():
                layer.decode(query, out, step, 0, count)

    def _warm_up_cut_prefill(self) -> None:
        """Launches prefill attention of one token after the longest prefix, whose tile is cut into parts."""
        seq_len = min(len(table) for table in self._cos_sin.values())
        tiles = self.paged.tiles([1], [seq_len - 1])
        layer = next((layer for layer in self._layers.values() if not layer.spec.window), None)
        if tiles.parts is None or layer is None:
            return
        numbers = torch.tensor([0, seq_len, 0, 1], dtype=torch.int32, device=self._device)
        spec = layer.spec
        heads = torch.zeros(1, spec.num_q_heads, spec.head_dim, dtype=self.paged.dtype, device=self._device)
        rows, seq_lens, starts = numbers[:1], numbers[1:2], numbers[2:]
        step = StepInputs(rows, rows, rows, rows, seq_lens, starts, 0, tiles, {})
        layer.prefill(heads, torch.empty_like(heads), step, tiles)
