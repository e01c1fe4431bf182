"""Runs a decoder with latent attention on a GPU. Never waits for the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor

from baton.rpc.errors import Unsupported
from baton.worker.layers.cuda.latent_attention import CudaLatentAttention, PagedLatents
from baton.worker.layers.cuda.paged_device import PagedDevice
from baton.worker.layers.cuda.step import StepInputs
from baton.worker.layers.device import StateTensors
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.rope_config import RopeConfig
from baton.worker.layers.spec import AttentionSpec
from baton.worker.layers.state_spec import StateSpec
from baton.worker.quantization.neighbours import Norm


class LatentDevice(PagedDevice):
    """Implements baton.worker.layers.device.Device.

    `max_tokens`: of a step, whose memory the warm-up takes.
    """

    def __init__(self, paged: PagedLatents, cos_sin: Mapping[RopeConfig, Tensor], max_tokens: int) -> None:
        super().__init__(paged, cos_sin)
        self._latents = paged
        self._max_tokens = max_tokens
        self._layers: dict[int, CudaLatentAttention] = {}

    def attention(
        self,
        index: int,
        spec: AttentionSpec,
        q_norm: Norm | None,
        k_norm: Norm | None,
        sinks: Tensor | None,
        relative: Tensor | None = None,
    ) -> NoReturn:
        """Raises Unsupported: no family has both kinds of attention."""
        raise Unsupported("a model with latent attention has keys and values of heads too", field="model")

    def latent_attention(self, index: int, spec: LatentSpec, kv_norm: Norm, kv_b: Tensor) -> CudaLatentAttention:
        """Returns layer `index`'s ops."""
        self._layers[index] = CudaLatentAttention(index, spec, self._latents, self._cos_sin[spec.rope], kv_norm, kv_b)
        return self._layers[index]

    def recurrence(self, index: int, spec: StateSpec, tensors: StateTensors) -> NoReturn:
        """Raises Unsupported: a check at start refuses such models by name."""
        raise Unsupported("executor=cuda has no layers with states beside latent attention", field="model")

    def warm_up(self) -> None:
        """Launches the attention of decodes of any number, and of the largest chunk after the longest prefix."""
        paged, layer = self._latents, self._layers[0]
        most = paged.max_seqs
        nothing = torch.zeros(most, dtype=torch.int32, device=self._device)
        counts = sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power < most)})
        cuts_of = {count: paged.cut(nothing[:count]) for count in counts}
        query, out = self._heads(most)
        for count, cuts in cuts_of.items():
            step = StepInputs(nothing, nothing, nothing, nothing, nothing, nothing, count, None, cuts)
            layer.decode(query, out, step, 0, count)
        seq_len = min(len(table) for table in self._cos_sin.values())
        chunk = min(self._max_tokens, seq_len)
        numbers = torch.tensor([0, seq_len, 0, chunk], dtype=torch.int32, device=self._device)
        rows, seq_lens, starts = numbers[:1], numbers[1:2], numbers[2:]
        tiles = paged.tiles([chunk], [seq_len - chunk])
        step = StepInputs(rows, rows, rows, rows, seq_lens, starts, 0, tiles, {})
        layer.prefill(*self._heads(chunk), step, tiles)

    def _heads(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Returns queries and an output of so many tokens."""
        spec = self._layers[0].spec
        query = torch.zeros(num_tokens, spec.num_q_heads, spec.qk_dim, dtype=self.dtype, device=self._device)
        return query, query.new_empty(num_tokens, spec.num_q_heads, spec.value_dim)
