"""Ops of packed experts on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from baton.kernels.moe.products import expert_products
from baton.kernels.packed.launch import has_e4m3
from baton.kernels.packed.weight import PackedWeight, readable, rounds
from baton.kernels.routing import Gate
from baton.kernels.table import FEW_PACKED_EXPERTS, Case, Row, find
from baton.rpc.errors import Unsupported
from baton.worker.quantization.base import Params, QuantMethod
from baton.worker.quantization.experts import DOWN, GATE_UP, ExpertsOps
from baton.worker.quantization.neighbours import Kernels, Norm, Stream
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.quantization.quantized.stacked import expert_of


class CudaPackedExperts(ExpertsOps):
    """Products that read experts as they are packed."""

    def __init__(
        self, kernels: Kernels, methods: Mapping[str, QuantMethod], device: torch.device, *, batch_invariant: bool
    ) -> None:
        """Raises Unsupported for gates and ups that are kept apart."""
        super().__init__(kernels)
        self._methods = {linear: _packed(method) for linear, method in methods.items()}
        self._has_e4m3 = has_e4m3(device)
        capability, _ = torch.cuda.get_device_capability(device)
        self._case = Case("cuda", capability, batch_invariant=batch_invariant)
        self._rows: dict[tuple[bool, int], Row] = {}  # by whether weights may be rounded, and the number of pairs

    def run(self, params: Params, x: Tensor, weights: Tensor, ids: Tensor, gate: Gate) -> Tensor:
        gate_up, down = self._weight(params, GATE_UP), self._weight(params, DOWN)
        row = self._row(x.dtype, ids.numel(), gate_up, down)
        out: Tensor = row.load()(x, weights, ids, gate_up, down, gate)
        return out

    def product(self, params: Params, linear: str, rows: Tensor, ids: Tensor) -> Tensor:
        return expert_products(rows, ids, self._weight(params, linear))

    def add(self, params: Params, x: Tensor, weights: Tensor, ids: Tensor, gate: Gate, stream: Stream) -> None:
        gate_up, down = self._weight(params, GATE_UP), self._weight(params, DOWN)
        row = self._row(x.dtype, ids.numel(), gate_up, down)
        if row is FEW_PACKED_EXPERTS:
            row.load()(x, weights, ids, gate_up, down, gate, residual=stream.settled())
        else:
            stream.add(row.load()(x, weights, ids, gate_up, down, gate))

    def fuses_norm(self, params: Params, num_pairs: int) -> bool:
        num_experts = len(params[f"{DOWN}.weight"])
        return FEW_PACKED_EXPERTS.serves(
            replace(self._case, num_pairs=num_pairs, num_experts=num_experts, weights="packed")
        )

    def add_normed(self, params: Params, stream: Stream, norm: Norm, weights: Tensor, ids: Tensor, gate: Gate) -> None:
        x = stream.settled()
        gate_up, down = self._weight(params, GATE_UP), self._weight(params, DOWN)
        FEW_PACKED_EXPERTS.load()(x, weights, ids, gate_up, down, gate, norm=norm.weight, eps=norm.eps, residual=x)

    def _row(self, dtype: torch.dtype, num_pairs: int, gate_up: PackedWeight, down: PackedWeight) -> Row:
        key = (rounds(gate_up) and rounds(down), num_pairs)
        if key not in self._rows:
            case = replace(
                self._case,
                dtype=dtype,
                num_pairs=num_pairs,
                num_experts=down.num_experts,
                weights="rounding" if key[0] else "packed",
            )
            self._rows[key] = find("run_experts", case)
        return self._rows[key]

    def _weight(self, params: Params, linear: str) -> PackedWeight:
        """Returns the first expert's weight. Raises Unsupported for one without kernels."""
        method = self._methods[linear]
        weight = method.packed_weight(expert_of(params, linear, 0))
        if weight.scale is not None and weight.scale.dtype == torch.float8_e4m3fn and not self._has_e4m3:
            raise Unsupported(
                f"experts in {method.name} have scales in FP8, which need compute capability 8.9; use executor=cpu, or "
                "a newer GPU",
                field="model",
            )
        stored = readable(weight.stored, has_e4m3=self._has_e4m3)
        return weight._replace(stored=stored, num_experts=len(params[f"{linear}.weight"]))


def _packed(method: QuantMethod) -> PackedMethod:
    if not isinstance(method, PackedMethod):
        raise Unsupported(
            f"executor=cuda has no kernels for experts in {method.name}, whose gates and ups share no matrix; use "
            "executor=cpu",
            field="model",
        )
    return method
