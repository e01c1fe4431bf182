"""Linear layers: their parameters, and the ops of their weight format on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from baton.worker.layers.device import Device
from baton.worker.quantization.base import Params, QuantMethod
from baton.worker.quantization.neighbours import Norm, Stream


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """The parameters of a linear layer in their format."""

    method: QuantMethod
    params: Params
    name: str = ""  # of its first part in the checkpoint, without ".weight"


class Linear:
    """x @ weight^T + bias on a device. Only the weight format reads the parameters."""

    __slots__ = ("_ops", "_params")

    def __init__(self, weights: LinearWeights, device: Device[Any]) -> None:
        self._ops = device.linear_ops(weights.method, weights.name)
        self._params = self._ops.prepared(weights.params)

    def project(self, stream: Stream, norm: Norm | None, out: Tensor | None = None) -> Tensor:
        """Returns the linear of the normed stream."""
        return self._ops.project(self._params, stream, norm, out)

    def gate(self, stream: Stream, norm: Norm | None) -> Tensor:
        """Returns silu(first half) * second half of the linear of the normed stream."""
        return self._ops.gate(self._params, stream, norm)

    def activate(self, stream: Stream, norm: Norm | None, activation: str) -> Tensor:
        """Returns activation(linear) of the normed stream."""
        return self._ops.activate(self._params, stream, norm, activation)

    def multiply(self, x: Tensor) -> Tensor:
        """Returns the linear of x."""
        return self._ops.multiply(self._params, x)

    def multiply_wide(self, x: Tensor) -> Tensor:
        """Returns the linear of x in fp32, of weights in fp32."""
        return self._ops.multiply_wide(self._params, x)

    def fuses_gate(self, x: Tensor) -> bool:
        """Returns whether `add_gated` is faster, for as many tokens as x has, than a gate and `add`."""
        return self._ops.fuses_gate(self._params, x)

    def add_gated(self, gate_up: Tensor, stream: Stream, scale: float = 1.0) -> None:
        """Adds scale * linear(silu(first half) * second half of gate_up) to the stream."""
        self._ops.add_gated(self._params, gate_up, stream, scale)

    def add(self, x: Tensor, stream: Stream, scale: float) -> None:
        """Adds scale * linear(x) to the stream."""
        self._ops.add(self._params, x, stream, scale)


class OutputLinear:
    """The last linear of attention or MLP. Its output is normed if the layer has output norms, scaled, and added.

    `norms_sum`: the norm is that of the sum.
    """

    __slots__ = ("_kernels", "_linear", "_norm", "_norms_sum", "_scale")

    def __init__(
        self, weights: LinearWeights, norm: Norm | None, scale: float, device: Device[Any], *, norms_sum: bool = False
    ) -> None:
        self._linear = Linear(weights, device)
        self._kernels = device.kernels
        self._norm = norm
        self._scale = scale
        self._norms_sum = norms_sum

    def fuses_gate(self, x: Tensor) -> bool:
        """Returns whether `add_gated` is faster, for as many tokens as x has, than a gate and `add`."""
        return self._norm is None and self._linear.fuses_gate(x)

    def add_gated(self, gate_up: Tensor, stream: Stream) -> None:
        """Adds the linear of silu(first half) * second half of gate_up to the stream."""
        self._linear.add_gated(gate_up, stream, self._scale)

    def add(self, x: Tensor, stream: Stream) -> None:
        """Adds the linear of x to the stream."""
        if self._norm is None or self._norms_sum:
            self._linear.add(x, stream, self._scale)
            if self._norm is not None:
                stream.norm(self._norm, self._kernels)
            return
        normed = self._norm.apply(self._linear.multiply(x), self._kernels)
        stream.add(normed if self._scale == 1 else normed.mul_(self._scale))
