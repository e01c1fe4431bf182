"""A device whose linears and embedding may be changed by adapters, row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from baton.worker.adapters.bank import AdapterBank
from baton.worker.adapters.base_model import BaseModel
from baton.worker.adapters.experts import AdapterExpertsOps
from baton.worker.adapters.ops import AdapterOps, SiteUpdates
from baton.worker.layers.device import AttentionOps, Device, LatentOps, StateOps, StateTensors
from baton.worker.layers.latent_spec import LatentSpec
from baton.worker.layers.spec import AttentionSpec
from baton.worker.layers.state_spec import StateSpec
from baton.worker.layers.table import Table
from baton.worker.quantization.base import LinearOps, QuantMethod
from baton.worker.quantization.experts import ExpertsMethod, ExpertsOps
from baton.worker.quantization.neighbours import Kernels, Norm

S = TypeVar("S")


class AdapterDevice(Generic[S]):
    """Implements Device by another one, and the updates of a bank."""

    def __init__(
        self,
        device: Device[S],
        bank: AdapterBank,
        base: BaseModel,
        updates: Callable[[str], SiteUpdates],  # of the site of a name
        add: Callable[..., Tensor],  # the kernel add_adapters
        embed: Callable[..., Tensor],  # the kernel embed_adapters
    ) -> None:
        self._device = device
        self._bank = bank
        self._base = base
        self._embedding = bank.sites[base.embedding]
        self._updates = updates
        self._add = add
        self._embed = embed

    @property
    def kernels(self) -> Kernels:
        return self._device.kernels

    @property
    def dtype(self) -> torch.dtype:
        return self._device.dtype

    def inputs(self, step: S) -> tuple[Tensor, Tensor]:
        return self._device.inputs(step)

    def linear_ops(self, method: QuantMethod, name: str = "") -> LinearOps:
        """Returns ops of this linear alone, or the format's if adapters do not change it."""
        ops = self._device.linear_ops(method, name)
        if name not in self._bank.sites:
            return ops
        return AdapterOps(self.kernels, ops, self._bank, self._updates(name))

    def experts_ops(self, method: ExpertsMethod, name: str = "") -> ExpertsOps:
        """Returns ops of this layer's experts, or the format's if adapters do not change experts."""
        ops, sites = self._device.experts_ops(method, name), self._base.experts.get(name)
        if sites is None or not self._bank.expert_rank:
            return ops
        return AdapterExpertsOps(self.kernels, ops, self._bank, sites, self._add)

    def taken(self, table: Table, ids: Tensor) -> Tensor:
        return self._device.taken(table, ids)

    def embed(self, table: Table, step: S) -> Tensor:
        """Returns the tokens' rows of `table`, with the updates of rows with adapters."""
        embedded, rows = self._device.embed(table, step), self._bank.rows
        if rows is None:
            return embedded
        token_ids, _ = self._device.inputs(step)
        return self._embed(token_ids, embedded, *self._embedding, len(table), *rows)

    def embed_positions(self, table: Tensor, step: S) -> Tensor:
        return self._device.embed_positions(table, step)

    def attention(
        self,
        index: int,
        spec: AttentionSpec,
        q_norm: Norm | None,
        k_norm: Norm | None,
        sinks: Tensor | None,
        relative: Tensor | None = None,
    ) -> AttentionOps[Any]:
        return self._device.attention(index, spec, q_norm, k_norm, sinks, relative)

    def latent_attention(self, index: int, spec: LatentSpec, kv_norm: Norm, kv_b: Tensor) -> LatentOps[Any]:
        return self._device.latent_attention(index, spec, kv_norm, kv_b)

    def recurrence(self, index: int, spec: StateSpec, tensors: StateTensors) -> StateOps[Any]:
        return self._device.recurrence(index, spec, tensors)
