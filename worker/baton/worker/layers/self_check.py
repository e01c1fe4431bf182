"""Compares products with quantized weights on a device with those of the dequantized weights, at start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from baton.rpc.errors import InvalidRequest
from baton.worker.layers.device import Device
from baton.worker.layers.experts import StackedWeights
from baton.worker.layers.linear import LinearWeights
from baton.worker.quantization.base import Params, QuantMethod
from baton.worker.quantization.quantized.experts import PackedExperts
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.quantization.quantized.per_part import PerPart

_TOKENS = 2
# Of the sum of the terms' magnitudes. A wrong kernel is off by much more, rounding by much less.
_BOUNDS = {torch.float32: 1e-4}
_HALF_BOUND = 2.0**-5


def check_products(weights: Any, device: Device[Any]) -> None:
    """Checks the smallest linear of each way that a tree of weights is packed. Raises InvalidRequest for a mismatch."""
    smallest: dict[str, tuple[PackedMethod, Params]] = {}
    for method, params in _linears(weights):
        if isinstance(method, PackedMethod):
            known = smallest.get(method.name)
            if known is None or _num_bytes(params) < _num_bytes(known[1]):
                smallest[method.name] = (method, params)
    with torch.inference_mode():
        for method, params in smallest.values():
            _check(method, params, device)


def _check(method: PackedMethod, params: Params, device: Device[Any]) -> None:
    first = next(method.blocks(params))
    weight = method.dequantized(params, first).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TOKENS, weight.shape[1], generator=generator).to(weight.device, device.dtype)
    bias = params["bias"][first].double() if "bias" in params else torch.zeros(len(weight), dtype=torch.double)
    ops = device.linear_ops(method)
    found = ops.multiply(ops.prepared(params), x)[:, first].double()
    error = (found - (x.double() @ weight.t() + bias)).abs()
    magnitude = x.double().abs() @ weight.abs().t() + bias.abs()
    bound = _BOUNDS.get(device.dtype, _HALF_BOUND)
    if not bool((error <= bound * magnitude).all()):  # not finite values neither
        worst = float((error / magnitude).max())
        raise InvalidRequest(
            f"a product with weights in {method.name} differs from that of the dequantized weights by {worst:.2g} of "
            f"its terms; at most {bound:.2g} is rounding. The checkpoint is damaged, or the kernel is wrong",
            field="model",
        )


def _linears(node: Any) -> Iterator[tuple[QuantMethod, Params]]:
    """Yields the linears of a tree of weights, parts and experts apart; of experts, the first."""
    if isinstance(node, LinearWeights):
        yield from node.method.split(node.params) if isinstance(node.method, PerPart) else [(node.method, node.params)]
    elif isinstance(node, StackedWeights):
        if isinstance(node.method, PackedExperts):
            yield from node.method.split(node.params, 0)
    elif isinstance(node, tuple):
        for child in node:
            yield from _linears(child)
    else:
        for name in getattr(node, "__dataclass_fields__", ()):
            yield from _linears(getattr(node, name))


def _num_bytes(params: Params) -> int:
    return sum(one.nbytes for one in params.values())
