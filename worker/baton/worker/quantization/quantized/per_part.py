"""Linears whose parts are stored in different ways, or cannot share one matrix: each part has parameters of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.worker.quantization.base import Finish, LinearOps, LinearShape, Params, QuantMethod, Source
from baton.worker.quantization.neighbours import Kernels, Norm, Stream
from baton.worker.quantization.quantized.few_rows import cpu_ops
from baton.worker.quantization.quantized.method import PackedMethod


class PerPart:
    """Implements QuantMethod over the methods of the parts, in their order."""

    def __init__(self, methods: Sequence[QuantMethod]) -> None:
        self._methods = tuple(methods)
        self.name = " | ".join(method.name for method in methods)

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> Params:
        """Allocates each part."""
        params: dict[str, Tensor] = {}
        for index, (method, part) in enumerate(self._parts(shape)):
            made = method.create(part, dtype, device)
            params |= {f"{index}.{name}": tensor for name, tensor in made.items()}
        return params

    def load(self, params: Params, shape: LinearShape, source: Source) -> Finish:
        """Fills each part."""
        parts = enumerate(self._parts(shape))
        return joined(method.load(part_of(params, index), part, source) for index, (method, part) in parts)

    def on_cpu(self, kernels: Kernels) -> LinearOps:
        return _Ops(kernels, [method.on_cpu(kernels) for method in self._methods], self._methods)

    def on_bfloat16(self, kernels: Kernels) -> LinearOps:
        ops = [cpu_ops(method, kernels, torch.bfloat16) for method in self._methods]
        return _Ops(kernels, ops, self._methods)

    def on_cuda(self, kernels: Kernels, device: torch.device, *, batch_invariant: bool) -> LinearOps:
        ops = [method.on_cuda(kernels, device, batch_invariant=batch_invariant) for method in self._methods]
        return _Ops(kernels, ops, self._methods)

    def split(self, params: Params) -> Iterator[tuple[QuantMethod, Params]]:
        """Yields the method and the parameters of each part."""
        for index, method in enumerate(self._methods):
            yield method, part_of(params, index)

    def _parts(self, shape: LinearShape) -> Iterator[tuple[QuantMethod, LinearShape]]:
        for method, part in zip(self._methods, shape.parts, strict=True):
            yield method, replace(shape, parts=[part])


class _Ops(LinearOps):
    def __init__(self, kernels: Kernels, ops: Sequence[LinearOps], methods: Sequence[QuantMethod]) -> None:
        super().__init__(kernels)
        self._ops = ops
        self._methods = methods

    def reset(self) -> None:
        for ops in self._ops:
            ops.reset()

    def prepared(self, params: Params) -> Params:
        """Returns those of each part."""
        return {
            f"{index}.{name}": tensor
            for index, ops in enumerate(self._ops)
            for name, tensor in ops.prepared(part_of(params, index)).items()
        }

    def project(self, params: Params, stream: Stream, norm: Norm | None, out: Tensor | None = None) -> Tensor:
        """Lets each part fuse the norm of one token, whose parts follow each other in memory."""
        if len(stream.residual) != 1 or stream.update is not None or not stream.fuse_norms:
            return super().project(params, stream, norm, out)
        own = [part_of(params, index) for index in range(len(self._ops))]
        sizes = list(map(_num_rows, self._methods, own))
        if out is None:
            out = stream.residual.new_empty(1, sum(sizes))
        for ops, one, into in zip(self._ops, own, torch.split(out, sizes, dim=1), strict=True):
            ops.project(one, stream, norm, into)
        return out

    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        products = [ops.multiply(part_of(params, index), x) for index, ops in enumerate(self._ops)]
        return torch.cat(products, dim=1) if out is None else torch.cat(products, dim=1, out=out)


def _num_rows(method: QuantMethod, params: Params) -> int:
    return method.out_features(params) if isinstance(method, PackedMethod) else len(params["weight"])


def part_of(params: Params, index: int) -> Mapping[str, Tensor]:
    """Returns the parameters of one part."""
    prefix = f"{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in params.items() if name.startswith(prefix)}


def joined(finishes: Iterator[Finish | None]) -> Finish:
    """Returns what does all of these."""
    wanted = [finish for finish in finishes if finish is not None]

    def finish() -> None:
        for one in wanted:
            one()

    return finish
