"""What all models on a GPU share: kernels, linears and embeddings. Never waits for the device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.linear.quantized.take_rows import take_rows
from baton.kernels.packed.launch import has_e4m3
from baton.kernels.packed.weight import readable
from baton.kernels.table import Case, find
from baton.worker.layers.rope_config import RopeConfig
from baton.worker.layers.table import PackedTable, Table
from baton.worker.quantization.base import LinearOps, QuantMethod
from baton.worker.quantization.experts import ExpertsMethod, ExpertsOps


class CudaKernels:
    """Implements Kernels."""

    rms_norm = staticmethod(find("rms_norm", Case("cuda")).load())
    layer_norm = staticmethod(find("layer_norm", Case("cuda")).load())
    activate = staticmethod(find("activate", Case("cuda")).load())
    silu_mul = staticmethod(find("silu_mul", Case("cuda")).load())
    sigmoid = staticmethod(torch.sigmoid_)
    route = staticmethod(find("route", Case("cuda")).load())


class CudaLinears:
    """The parts of baton.worker.layers.device.Device that need no attention."""

    def __init__(
        self, device: torch.device, cos_sin: Mapping[RopeConfig, Tensor], *, batch_invariant: bool = False
    ) -> None:
        self.kernels = CudaKernels()
        self._device = device
        self._cos_sin = {rope: table.to(device) for rope, table in cos_sin.items()}
        self._invariant = batch_invariant
        self._has_e4m3 = has_e4m3(device)
        self._linear_ops: dict[str, LinearOps] = {}
        self._experts_ops: dict[str, ExpertsOps] = {}

    def linear_ops(self, method: QuantMethod, name: str = "") -> LinearOps:
        """Returns the ops of a weight format."""
        if method.name not in self._linear_ops:
            made = method.on_cuda(self.kernels, self._device, batch_invariant=self._invariant)
            self._linear_ops[method.name] = made
        return self._linear_ops[method.name]

    def experts_ops(self, method: ExpertsMethod, name: str = "") -> ExpertsOps:
        """Returns the ops of a weight format of experts."""
        if method.name not in self._experts_ops:
            made = method.on_cuda(self.kernels, self._device, batch_invariant=self._invariant)
            self._experts_ops[method.name] = made
        return self._experts_ops[method.name]

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""

    def taken(self, table: Table, ids: Tensor) -> Tensor:
        """Returns rows of a table, [num_ids, columns]."""
        if not isinstance(table, PackedTable):
            return functional.embedding(ids, table)
        weight = table.method.packed_weight(table.params)
        return take_rows(
            weight._replace(stored=readable(weight.stored, has_e4m3=self._has_e4m3)), ids, table.columns, self.dtype
        )

    def reset(self) -> None:
        """Restores scratch memory after a step that failed midway."""
        for ops in self._linear_ops.values():
            ops.reset()
        for experts_ops in self._experts_ops.values():
            experts_ops.reset()
