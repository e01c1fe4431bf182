"""Linears whose weights stay as a checkpoint packs them, and are dequantized block by block in each product."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from baton.kernels.packed.weight import PackedWeight
from baton.rpc.errors import InvalidRequest, Unsupported
from baton.worker.quantization.base import Finish, LinearOps, LinearShape, Params, Part, Source
from baton.worker.quantization.neighbours import Kernels
from baton.worker.quantization.quantized.tensors import StoredTensor, check_finite

_BLOCK_VALUES = 1 << 18  # dequantized at once: they stay in a core's cache


class PackedMethod(ABC):
    """Implements QuantMethod. A subclass states the stored tensors, the weight's own first, and how they are read."""

    def __init__(self, name: str, tensors: Sequence[StoredTensor]) -> None:
        self._name = name
        self._tensors = tuple(tensors)
        self._unit = math.lcm(*(one.rows for one in tensors if one.rows < _BLOCK_VALUES))  # rows of a block

    @property
    def name(self) -> str:
        return self._name

    @property
    def unit(self) -> int:
        """Rows of the weight that are dequantized together."""
        return self._unit

    def on_bfloat16(self, kernels: Kernels) -> LinearOps:
        """Returns ops for a CPU that has kernels for few rows of bfloat16."""
        return self.on_cpu(kernels)

    @abstractmethod
    def dequantized(self, params: Params, rows: slice) -> Tensor:
        """Returns rows of the weight, [rows, in_features] fp32. They begin at a whole unit."""

    def refusal(self, shape: LinearShape) -> str:
        """Returns why the format has no linear of this shape; empty if it has."""
        return ""

    def complete(self, params: Params, shape: LinearShape) -> None:  # noqa: B027 - most need nothing
        """Raises InvalidRequest for values that the format does not have."""

    def joins(self, shape: LinearShape) -> bool:
        """Returns whether one matrix can hold all parts: whether each begins at a whole row of every tensor."""
        starts = [sum(part.rows for part in shape.parts[:index]) for index in range(len(shape.parts))]
        return all(start % one.rows == 0 for start in starts for one in self._tensors)

    def joins_gates(self, shape: LinearShape) -> bool:
        """As `joins`, for the gates and ups of experts."""
        return self.joins(shape)

    def out_features(self, params: Params) -> int:
        """Returns the rows of the weight."""
        return len(params[self._tensors[0].param]) * self._tensors[0].rows

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> Params:
        """Allocates the packed tensors, and the bias if there is one. Raises InvalidRequest for an impossible shape."""
        if reason := self.refusal(shape):
            names = ", ".join(part.name for part in shape.parts)
            raise InvalidRequest(f"{names}: {reason}", field="model")
        params = {}
        for one in self._tensors:
            rows, columns = one.size(shape.out_features, shape.in_features)
            params[one.param] = torch.empty(rows, columns, dtype=one.dtype, device=device)
        if shape.bias:
            params["bias"] = torch.empty(shape.out_features, dtype=dtype, device=device)
        return params

    def load(self, params: Params, shape: LinearShape, source: Source) -> Finish:
        """Fills the rows of each part."""
        for part, rows in parts_of(shape):
            for one in self._tensors:
                _load(one, params[one.param][one.span(rows)], part.name, (part.rows, shape.in_features), source)
            if shape.bias:
                source(f"{part.name}.bias", (part.rows,), params["bias"][rows])
        return partial(self._finish, params, shape)

    def blocks(self, params: Params) -> Iterator[slice]:
        """Yields runs of rows that are dequantized at once."""
        columns = int(params[self._tensors[0].param].shape[1] * self._tensors[0].columns)
        step = max(1, _BLOCK_VALUES // max(1, columns) // self._unit) * self._unit
        total = self.out_features(params)
        for start in range(0, total, step):
            yield slice(start, min(start + step, total))

    def taken(self, params: Params, ids: Tensor) -> Tensor:
        """Returns rows of the weight, [num_ids, in_features] fp32 on the CPU. Dequantizes whole units."""
        units = ids // self._unit
        own = {name: self._units_of(params, name, units).cpu() for name in params if name != "bias"}
        found = self.dequantized(own, slice(0, len(ids) * self._unit))
        return found.view(len(ids), self._unit, -1)[torch.arange(len(ids)), ids % self._unit]

    def _units_of(self, params: Params, name: str, units: Tensor) -> Tensor:
        """Returns a tensor's rows of some units, one unit after another; all of what no rows have of their own."""
        one = next((each for each in self._tensors if each.param == name), None)
        rows = 0 if one is None else self._unit // one.rows
        if not rows:
            return params[name]
        at = (units[:, None] * rows + torch.arange(rows)).clamp_(max=len(params[name]) - 1).flatten()
        return params[name][at.to(params[name].device)]

    def on_cpu(self, kernels: Kernels) -> LinearOps:
        """Returns ops that dequantize a block of rows at a time."""
        return PackedOps(kernels, self)

    def packed_weight(self, params: Params) -> PackedWeight:
        """Returns the weight as the GPU's kernels read it. Raises Unsupported if they do not."""
        raise Unsupported(f"executor=cuda has no kernels for weights in {self.name}; use executor=cpu", field="model")

    def on_cuda(self, kernels: Kernels, device: torch.device, *, batch_invariant: bool) -> LinearOps:
        """Returns ops that use the GPU's kernels."""
        from baton.worker.quantization.quantized.cuda import CudaPackedOps  # imported here, because CPUs have no Triton

        return CudaPackedOps(kernels, self, device, batch_invariant=batch_invariant)

    def _finish(self, params: Params, shape: LinearShape) -> None:
        for part, rows in parts_of(shape):
            for one in self._tensors:
                values = params[one.param][one.span(rows)]
                if one.one_a_part:
                    values.copy_(values[:1].clone().expand_as(values))
                if values.is_floating_point() and one is not self._tensors[0]:
                    check_finite(values[:1] if one.one_a_part else values, part.name + one.ending)
        self.complete(params, shape)


class PackedOps(LinearOps):
    """Products with a packed weight."""

    def __init__(self, kernels: Kernels, method: PackedMethod) -> None:
        super().__init__(kernels)
        self._method = method

    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        method = self._method
        if out is None:
            out = x.new_empty(len(x), method.out_features(params))
        for rows in method.blocks(params):
            torch.mm(x, method.dequantized(params, rows).to(x.dtype).t(), out=out[:, rows])
        bias = params.get("bias")
        return out if bias is None else out.add_(bias)


def parts_of(shape: LinearShape) -> Iterator[tuple[Part, slice]]:
    """Yields each part with its rows."""
    start = 0
    for part in shape.parts:
        yield part, slice(start, start + part.rows)
        start += part.rows


def _load(one: StoredTensor, into: Tensor, stem: str, size: tuple[int, int], source: Source) -> None:
    shape = (1, 1) if one.one_a_part else one.size(*size)
    into = into[:1] if one.one_a_part else into
    if one.transposed:
        source(stem + one.ending, shape[::-1], into.t())
    else:
        source(stem + one.ending, shape, into)
