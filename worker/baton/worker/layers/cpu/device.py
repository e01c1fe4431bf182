"""Runs a model on a CPU with PyTorch's ops, over blocks in host memory if it keeps keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from baton.kernels.reference.linear.packed import can_pack
from baton.worker.layers.cpu.attention import CpuAttention
from baton.worker.layers.cpu.kernels import CpuKernels, InvariantKernels
from baton.worker.layers.cpu.kv import PagedKv
from baton.worker.layers.cpu.latent_attention import CpuLatentAttention
from baton.worker.layers.cpu.recurrence import CpuRecurrence
from baton.worker.layers.cpu.step import StepInputs, WholeInputs
from baton.worker.layers.cpu.whole_attention import CpuWholeAttention
from baton.worker.layers.device import StateTensors
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.rope import query_scales
from baton.worker.layers.rope_config import RopeConfig
from baton.worker.layers.spec import AttentionSpec
from baton.worker.layers.state_places import StatePlaces
from baton.worker.layers.state_spec import StateSpec
from baton.worker.layers.table import Table, take
from baton.worker.quantization.base import LinearOps, QuantMethod
from baton.worker.quantization.experts import ExpertsMethod, ExpertsOps
from baton.worker.quantization.invariant_experts import InvariantExpertsOps
from baton.worker.quantization.neighbours import Norm
from baton.worker.quantization.onednn import InvariantOps, PackedOps
from baton.worker.quantization.quantized.few_rows import cpu_ops
from baton.worker.quantization.registry import UNQUANTIZED, UNQUANTIZED_EXPERTS

CpuInputs = StepInputs | WholeInputs


class CpuDevice:
    """Implements baton.worker.layers.device.Device."""

    def __init__(
        self,
        kv: PagedKv,
        cos_sin: Mapping[RopeConfig, Tensor],
        *,
        packs: bool = False,  # linears multiply with packed copies of their matrices, where that is possible
        places: Sequence[int] = (),  # of each layer in its KV group
        states: Mapping[int, StatePlaces] = MappingProxyType({}),  # by KV group
        batch_invariant: bool = False,  # a token's results do not depend on other tokens, bit for bit
    ) -> None:
        self.kernels = InvariantKernels() if batch_invariant else CpuKernels()
        self._kv = kv
        self._places = places
        self._states = states
        self._batch_invariant = batch_invariant
        self._cos_sin = cos_sin  # [max_model_len, head_dim] fp32 each
        self._linear_ops: dict[str, LinearOps] = {}
        if batch_invariant:
            self._linear_ops[UNQUANTIZED.name] = InvariantOps(self.kernels)
        elif packs and can_pack(self.dtype):
            self._linear_ops[UNQUANTIZED.name] = PackedOps(self.kernels)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self._kv.dtype

    def inputs(self, step: CpuInputs) -> tuple[Tensor, Tensor]:
        """Returns the step's token ids and positions."""
        return step.token_ids, step.positions

    def linear_ops(self, method: QuantMethod, name: str = "") -> LinearOps:
        """Returns the ops of a weight format."""
        if method.name not in self._linear_ops:
            self._linear_ops[method.name] = cpu_ops(method, self.kernels, self.dtype)
        return self._linear_ops[method.name]

    def experts_ops(self, method: ExpertsMethod, name: str = "") -> ExpertsOps:
        """Returns the ops of a weight format of experts."""
        if self._batch_invariant and method is UNQUANTIZED_EXPERTS:
            return InvariantExpertsOps(self.kernels)
        return method.on_cpu(self.kernels)

    def taken(self, table: Table, ids: Tensor) -> Tensor:
        """Returns rows of a table, [num_ids, columns]."""
        return take(table, ids, self.dtype)

    def embed(self, table: Table, step: CpuInputs) -> Tensor:
        """Returns the tokens' rows of `table`."""
        return self.taken(table, step.token_ids)

    def embed_positions(self, table: Tensor, step: CpuInputs) -> Tensor:
        """Returns the positions' rows of `table`."""
        return table.index_select(0, step.positions)

    def attention(
        self,
        index: int,
        spec: AttentionSpec,
        q_norm: Norm | None,
        k_norm: Norm | None,
        sinks: Tensor | None,
        relative: Tensor | None = None,
    ) -> Any:
        """Returns layer `index`'s ops, for steps of the kind that the model needs."""
        cos_sin = self._cos_sin[spec.rope]
        if not spec.causal:
            return CpuWholeAttention(spec, cos_sin, q_norm, k_norm, relative)
        assert relative is None, "no family with a cache has such scores"
        scales = query_scales(spec.rope, len(cos_sin))
        return CpuAttention(index, self._kv, spec, cos_sin, scales, q_norm, k_norm, sinks)

    def latent_attention(self, index: int, spec: LatentSpec, kv_norm: Norm, kv_b: Tensor) -> CpuLatentAttention:
        """Returns layer `index`'s ops."""
        cache, cos_sin = self._kv.cache[index], self._cos_sin[spec.rope]
        group, invariant = self._kv.group_of(index), self._batch_invariant
        return CpuLatentAttention(cache, spec, cos_sin, kv_norm, kv_b, self.kernels, group, batch_invariant=invariant)

    def recurrence(self, index: int, spec: StateSpec, tensors: StateTensors) -> CpuRecurrence:
        """Returns layer `index`'s ops."""
        group, invariant = self._kv.group_of(index), self._batch_invariant
        return CpuRecurrence(spec, tensors, self._states[group], group, self._places[index], batch_invariant=invariant)
