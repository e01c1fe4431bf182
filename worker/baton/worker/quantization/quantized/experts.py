"""Experts whose linears are packed, each as a linear of the format: stacks of its parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from baton.kernels.packed.weight import rounds
from baton.kernels.reference.moe.experts import gated_by
from baton.kernels.reference.moe.groups import Groups
from baton.kernels.routing import Gate
from baton.kernels.table import WeightsKind
from baton.worker.quantization.base import Finish, LinearOps, LinearShape, Params, Part, QuantMethod, Source
from baton.worker.quantization.experts import DOWN, GATE_UP, ExpertsOps, ExpertsShape
from baton.worker.quantization.neighbours import Kernels
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.quantization.quantized.per_part import joined
from baton.worker.quantization.quantized.stacked import StackedSource, expert_of

_META = torch.device("meta")


class PackedExperts:
    """Implements ExpertsMethod for checkpoints that name each expert's linears, or stack their tensors."""

    def __init__(self, gate_up: QuantMethod, down: QuantMethod) -> None:
        self._methods = {GATE_UP: gate_up, DOWN: down}
        self.name = gate_up.name if gate_up.name == down.name else f"{gate_up.name} and {down.name}"

    def create(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> Params:
        """Allocates stacks of what one expert has."""
        return {
            f"{linear}.{name}": torch.empty(shape.num_experts, *one.shape, dtype=one.dtype, device=device)
            for linear, method in self._methods.items()
            for name, one in method.create(linears_of(shape, 0)[linear], dtype, _META).items()
        }

    def load(self, params: Params, shape: ExpertsShape, source: Source) -> Finish:
        """Fills the linears of each expert."""
        if "{}" in shape.names.down:
            return joined(self._loads(params, shape, source))
        stacks = StackedSource(source)
        finish = joined(self._loads(params, shape, stacks))
        stacks.run()
        return finish

    def on_cpu(self, kernels: Kernels) -> ExpertsOps:
        """Returns ops that compute each expert with tokens."""
        return _Ops(kernels, {linear: method.on_cpu(kernels) for linear, method in self._methods.items()})

    def on_cuda(self, kernels: Kernels, device: torch.device, *, batch_invariant: bool) -> ExpertsOps:
        """Returns ops that use the GPU's kernels. Raises Unsupported for linears that these do not read."""
        # Imported here, because CPUs have no Triton.
        from baton.worker.quantization.quantized.cuda_experts import CudaPackedExperts

        return CudaPackedExperts(kernels, self._methods, device, batch_invariant=batch_invariant)

    def kind(self, params: Params, *, has_e4m3: bool) -> WeightsKind:
        """Returns how the table of kernels calls the weights, of linears that the GPU's kernels read."""
        if not has_e4m3:
            return "packed"
        packed = [
            method.packed_weight(expert_of(params, linear, 0))
            for linear, method in self._methods.items()
            if isinstance(method, PackedMethod)
        ]
        return "rounding" if all(map(rounds, packed)) else "packed"

    def split(self, params: Params, expert: int) -> Iterator[tuple[QuantMethod, Params]]:
        """Yields the methods and the parameters of an expert's linears."""
        for linear, method in self._methods.items():
            yield method, expert_of(params, linear, expert)

    def _loads(self, params: Params, shape: ExpertsShape, source: Source) -> Iterator[Finish | None]:
        for expert in range(shape.num_experts):
            for linear, linear_shape in linears_of(shape, expert).items():
                yield self._methods[linear].load(expert_of(params, linear, expert), linear_shape, source)


class _Ops(ExpertsOps):
    def __init__(self, kernels: Kernels, ops: dict[str, LinearOps]) -> None:
        super().__init__(kernels)
        self._ops = ops

    def run(self, params: Params, x: Tensor, weights: Tensor, ids: Tensor, gate: Gate) -> Tensor:
        groups = Groups(ids)
        rows = groups.rows(x)
        out = torch.empty_like(rows)
        for expert, mine in groups.runs:
            gate_up = self._ops[GATE_UP].multiply(expert_of(params, GATE_UP, expert), rows[mine])
            self._ops[DOWN].multiply(expert_of(params, DOWN, expert), gated_by(gate_up, gate), out=out[mine])
        return groups.sums(out, weights)

    def product(self, params: Params, linear: str, rows: Tensor, ids: Tensor) -> Tensor:
        groups = Groups(ids)
        ordered = groups.sorted(rows)
        found = [
            self._ops[linear].multiply(expert_of(params, linear, expert), ordered[mine]) for expert, mine in groups.runs
        ]
        return groups.unsorted(torch.cat(found))


def linears_of(shape: ExpertsShape, expert: int) -> dict[str, LinearShape]:
    """Returns the linears of one expert."""
    names, size = shape.names, shape.intermediate_size
    rows = shape.gate_up_size // len(names.gate_up)
    parts = [Part(_stem(shape, name, expert), rows) for name in names.gate_up]
    down = Part(_stem(shape, names.down, expert), shape.hidden_size)
    return {
        GATE_UP: LinearShape(parts, shape.hidden_size, shape.bias),
        DOWN: LinearShape([down], size, shape.bias),
    }


def _stem(shape: ExpertsShape, name: str, expert: int) -> str:
    return shape.prefix + name.format(expert).removesuffix(".weight")
