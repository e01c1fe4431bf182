"""Unquantized experts: two stacks of matrices, and of biases if there are any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.reference.moe.groups import Groups
from baton.kernels.routing import Gate
from baton.kernels.table import FEW_EXPERTS, Case, Row, find
from baton.worker.quantization.base import Params, Source
from baton.worker.quantization.experts import ExpertsOps, ExpertsShape
from baton.worker.quantization.neighbours import Kernels, Norm, Stream


class UnquantizedExperts:
    """Implements ExpertsMethod: `gate_up` [num_experts, 2 intermediate_size, hidden_size], gates first, and `down`
    [num_experts, hidden_size, intermediate_size]; `gate_up_bias` and `down_bias` without the last dimension. Without
    gates, `gate_up` has half as many rows."""

    name = "unquantized"

    def create(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> Params:
        """Allocates the stacks."""
        wide, hidden, size = shape.gate_up_size, shape.hidden_size, shape.intermediate_size
        sizes: dict[str, tuple[int, ...]] = {"gate_up": (wide, hidden), "down": (hidden, size)}
        if shape.bias:
            sizes |= {"gate_up_bias": (wide,), "down_bias": (hidden,)}
        return {name: torch.empty(shape.num_experts, *size, dtype=dtype, device=device) for name, size in sizes.items()}

    def load(self, params: Params, shape: ExpertsShape, source: Source) -> None:
        """Fills each expert in place, or all at once if the checkpoint has stacks."""
        names = shape.names
        _fill(params["gate_up"], names.gate_up, shape, source, _Layout(names.transposed, names.interleaved))
        _fill(params["down"], (names.down,), shape, source, _Layout(names.transposed, False))
        if shape.bias:
            _fill(params["gate_up_bias"], names.gate_up_bias, shape, source, _Layout(False, names.interleaved))
            _fill(params["down_bias"], (names.down_bias,), shape, source, _Layout(False, False))

    def on_cpu(self, kernels: Kernels) -> ExpertsOps:
        """Returns ops that use a product for each expert with tokens."""
        return _CpuOps(kernels)

    def on_cuda(self, kernels: Kernels, device: torch.device, *, batch_invariant: bool) -> ExpertsOps:
        """Returns ops that use the GPU's kernels, by the number of tokens; those of many tokens if batch-invariant."""
        capability, _ = torch.cuda.get_device_capability(device)
        return _CudaOps(kernels, Case("cuda", capability, batch_invariant=batch_invariant))


class _CpuOps(ExpertsOps):
    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._run: Callable[..., Tensor] = find("run_experts", Case("cpu")).load()

    def run(self, params: Params, x: Tensor, weights: Tensor, ids: Tensor, gate: Gate) -> Tensor:
        return self._run(x, weights, ids, *_tensors(params, gate))

    def product(self, params: Params, linear: str, rows: Tensor, ids: Tensor) -> Tensor:
        groups = Groups(ids)
        return groups.unsorted(groups.products(groups.sorted(rows), params[linear], params.get(f"{linear}_bias")))


class _CudaOps(ExpertsOps):
    def __init__(self, kernels: Kernels, case: Case) -> None:
        super().__init__(kernels)
        self._case = case
        self._rows: dict[int, Row] = {}  # by the number of pairs

    def run(self, params: Params, x: Tensor, weights: Tensor, ids: Tensor, gate: Gate) -> Tensor:
        if gate.squares:
            return self.run_by_products(params, x, weights, ids, gate)
        out: Tensor = self._row(params, ids.numel()).load()(x, weights, ids, *_tensors(params, gate))
        return out

    def product(self, params: Params, linear: str, rows: Tensor, ids: Tensor) -> Tensor:
        from baton.kernels.moe.products import expert_products  # imported here, because CPUs have no Triton

        return expert_products(rows, ids, params[linear], params.get(f"{linear}_bias"))

    def add(self, params: Params, x: Tensor, weights: Tensor, ids: Tensor, gate: Gate, stream: Stream) -> None:
        row = self._row(params, ids.numel())
        if row is FEW_EXPERTS and not gate.squares:
            row.load()(x, weights, ids, *_tensors(params, gate), residual=stream.settled())
        else:
            super().add(params, x, weights, ids, gate, stream)

    def fuses_norm(self, params: Params, num_pairs: int) -> bool:
        return self._row(params, num_pairs) is FEW_EXPERTS

    def add_normed(self, params: Params, stream: Stream, norm: Norm, weights: Tensor, ids: Tensor, gate: Gate) -> None:
        x = stream.settled()
        fused = {"norm": norm.weight, "eps": norm.eps, "residual": x}
        FEW_EXPERTS.load()(x, weights, ids, *_tensors(params, gate), **fused)

    def _row(self, params: Params, num_pairs: int) -> Row:
        down = params["down"]
        if num_pairs not in self._rows:
            case = replace(self._case, dtype=down.dtype, num_pairs=num_pairs, num_experts=len(down))
            self._rows[num_pairs] = find("run_experts", case)
        return self._rows[num_pairs]


def _tensors(params: Params, gate: Gate) -> tuple[Tensor, Tensor, Gate, Tensor | None, Tensor | None]:
    return params["gate_up"], params["down"], gate, params.get("gate_up_bias"), params.get("down_bias")


class _Layout(NamedTuple):
    """The layout of a checkpoint's tensor, as differences from ours."""

    transposed: bool
    interleaved: bool


def _fill(stack: Tensor, names: Sequence[str], shape: ExpertsShape, source: Source, layout: _Layout) -> None:
    """Fills the rows of `stack` [num_experts, rows, ...] with the named parts, in order."""
    rows = stack.shape[1] // len(names)
    for index, name in enumerate(names):
        part = stack[:, index * rows : (index + 1) * rows]
        if "{}" not in name:
            _fill_part(source, shape.prefix + name, part, 1, layout)
            continue
        for expert, mine in enumerate(part.unbind()):
            _fill_part(source, shape.prefix + name.format(expert), mine, 0, layout)


def _fill_part(source: Source, name: str, into: Tensor, rows_dim: int, layout: _Layout) -> None:
    """Fills a tensor, whose dimension `rows_dim` is the linear's rows, from one of another layout."""
    shape = tuple(into.shape)
    if layout.interleaved:
        pairs = into.unflatten(rows_dim, (2, -1))  # type: ignore[no-untyped-call]
        into = pairs.transpose(rows_dim, rows_dim + 1)
    if layout.transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
        into = into.movedim(-1, rows_dim)
    source(name, shape, into)
