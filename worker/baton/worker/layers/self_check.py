"""Compares products with quantized weights, and packed embeddings, with the dequantized weights, at start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from baton.kernels.reference.moe.experts import run_experts
from baton.rpc.errors import InvalidRequest
from baton.worker.layers.device import Device
from baton.worker.layers.experts import StackedWeights
from baton.worker.layers.linear import LinearWeights
from baton.worker.layers.spec import ExpertsSpec
from baton.worker.layers.table import PackedTable
from baton.worker.quantization.base import Params, QuantMethod
from baton.worker.quantization.quantized.experts import PackedExperts
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.quantization.quantized.per_part import PerPart

_TOKENS = 2
# Of the sum of the terms' magnitudes. A wrong kernel is off by much more, rounding by much less.
_BOUNDS = {torch.float32: 1e-4}
_HALF_BOUND = 2.0**-5
_CPU = torch.device("cpu")


def check_products(weights: Any, experts: ExpertsSpec | None, device: Device[Any]) -> None:
    """Checks the smallest linear, and the first experts, of each way that a tree of weights is packed; and embeddings.

    `experts` describes those of the tree, if there are any. Raises InvalidRequest for a mismatch.
    """
    smallest: dict[str, tuple[PackedMethod, Params]] = {}
    first: dict[str, tuple[PackedExperts, Params]] = {}
    for method, params in packed_parts(weights):
        if isinstance(method, PackedExperts):
            first.setdefault(method.name, (method, params))
        elif isinstance(method, PackedMethod):
            known = smallest.get(method.name)
            if known is None or _num_bytes(params) < _num_bytes(known[1]):
                smallest[method.name] = (method, params)
    with torch.inference_mode():
        for linear, params in smallest.values():
            _check_linear(linear, params, device)
        for table in tables_of(weights):
            _check_table(table, device)
        for stack, params in first.values():
            assert experts is not None, "experts have a description"
            _check_experts(stack, params, experts, device)


def linears_of(weights: Any) -> Iterator[tuple[QuantMethod, Params]]:
    """Yields the linears of a tree of weights, parts apart."""
    for method, params in packed_parts(weights):
        if not isinstance(method, PackedExperts):
            yield method, params


def columns_of(method: QuantMethod, params: Params) -> int:
    """Returns the number of a linear's inputs."""
    if not isinstance(method, PackedMethod):
        return params["weight"].shape[1]
    return method.dequantized(params, next(method.blocks(params))).shape[1]


def _check_linear(method: PackedMethod, params: Params, device: Device[Any]) -> None:
    stored = {name: one.to(_CPU) for name, one in params.items()}
    rows = next(method.blocks(stored))
    weight = method.dequantized(stored, rows).double()
    x = _random_rows(weight.shape[1], device.dtype)
    bias = stored["bias"][rows].double() if "bias" in stored else torch.zeros(len(weight), dtype=torch.double)
    ops = device.linear_ops(method)
    found = ops.multiply(ops.prepared(params), x.to(_place(params)))[:, rows].to(_CPU).double()
    error = (found - (x.double() @ weight.t() + bias)).abs()
    magnitude = x.double().abs() @ weight.abs().t() + bias.abs()
    bound = _BOUNDS.get(device.dtype, _HALF_BOUND)
    if not bool((error <= bound * magnitude).all()):  # not finite values neither
        raise _mismatch(
            f"a product with weights in {method.name} differs from that", float((error / magnitude).max()), bound
        )


def _check_table(table: PackedTable, device: Device[Any]) -> None:
    """Checks the first and the last row."""
    ids = torch.tensor([0, len(table) - 1])
    expected = table.method.taken(table.params, ids).double()
    found = device.taken(table, ids.to(_place(table.params))).to(_CPU).double()
    bound = _BOUNDS.get(device.dtype, _HALF_BOUND)
    error = (found - expected).abs()
    if not bool((error <= bound * expected.abs()).all()):  # not finite values neither
        largest = float((error / expected.abs().clamp(min=1e-30)).max())
        raise _mismatch(f"an embedding in {table.method.name} differs from that", largest, bound)


def _check_experts(method: PackedExperts, params: Params, spec: ExpertsSpec, device: Device[Any]) -> None:
    """Checks sums of the first and the last expert, as those that both tokens choose."""
    router = spec.router
    used = [0, router.num_experts - 1]
    numbers = torch.arange(_TOKENS * router.top_k, dtype=torch.int32).view(_TOKENS, -1) % len(used)
    shares = torch.full(numbers.shape, 1.0 / router.top_k)
    each = [[_on_cpu(linear, own) for linear, own in method.split(params, expert)] for expert in used]
    (gate_up, up_bias), (down, down_bias) = (_stacked(linear) for linear in zip(*each, strict=True))
    x = _random_rows(gate_up.shape[2], device.dtype)
    expected = run_experts(x.float(), shares, numbers, gate_up, down, spec.gate, up_bias, down_bias)
    where = _place(params)
    ids = torch.tensor(used, dtype=torch.int32)[numbers.long()]
    found = device.experts_ops(method).run(params, x.to(where), shares.to(where), ids.to(where), spec.gate)
    error = float((found.to(_CPU).float() - expected).norm() / expected.norm())
    bound = _BOUNDS.get(device.dtype, _HALF_BOUND)
    if not error <= bound:  # NaN neither
        raise _mismatch(f"a sum of experts in {method.name} differs from that", error, bound)


def _on_cpu(method: QuantMethod, params: Params) -> tuple[Tensor, Tensor | None]:
    """Returns a linear's weight and bias in fp32."""
    stored = {name: one.to(_CPU) for name, one in params.items()}
    bias = stored.get("bias")
    return _dequantized(method, stored).float(), None if bias is None else bias.float()


def _stacked(linears: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    biases = [bias for _, bias in linears if bias is not None]
    return torch.stack([weight for weight, _ in linears]), torch.stack(biases) if biases else None


def _dequantized(method: QuantMethod, params: Params) -> Tensor:
    if isinstance(method, PerPart):
        return torch.cat([_dequantized(*part) for part in method.split(params)])
    if isinstance(method, PackedMethod):
        return method.dequantized(params, slice(0, method.out_features(params)))
    return params["weight"]


def _random_rows(columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(_TOKENS, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


def _place(params: Params) -> torch.device:
    return next(iter(params.values())).device


def _mismatch(what: str, error: float, bound: float) -> InvalidRequest:
    return InvalidRequest(
        f"{what} of the dequantized weights by {error:.2g} of its terms; at most {bound:.2g} is rounding. The "
        "checkpoint is damaged, or the kernel is wrong",
        field="model",
    )


def tables_of(node: Any) -> Iterator[PackedTable]:
    """Yields the packed embeddings of a tree of weights."""
    if isinstance(node, PackedTable):
        yield node
    elif isinstance(node, tuple):
        for child in node:
            yield from tables_of(child)
    else:
        for name in getattr(node, "__dataclass_fields__", ()):
            yield from tables_of(getattr(node, name))


def experts_of(node: Any) -> Iterator[StackedWeights]:
    """Yields the experts of a tree of weights, in any format."""
    if isinstance(node, StackedWeights):
        yield node
    elif isinstance(node, tuple):
        for child in node:
            yield from experts_of(child)
    elif not isinstance(node, LinearWeights):
        for name in getattr(node, "__dataclass_fields__", ()):
            yield from experts_of(getattr(node, name))


def packed_parts(node: Any) -> Iterator[tuple[QuantMethod | PackedExperts, Params]]:
    """Yields the linears and the packed experts of a tree of weights, parts apart."""
    if isinstance(node, LinearWeights):
        yield from node.method.split(node.params) if isinstance(node.method, PerPart) else [(node.method, node.params)]
    elif isinstance(node, StackedWeights):
        if isinstance(node.method, PackedExperts):
            yield node.method, node.params
    elif isinstance(node, tuple):
        for child in node:
            yield from packed_parts(child)
    else:
        for name in getattr(node, "__dataclass_fields__", ()):
            yield from packed_parts(getattr(node, name))


def _num_bytes(params: Params) -> int:
    return sum(one.nbytes for one in params.values())
