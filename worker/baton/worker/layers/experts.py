"""The MLP half of a layer with experts: its weights, and the order of its ops on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from baton.worker.layers.device import Device
from baton.worker.layers.linear import Linear, LinearWeights
from baton.worker.layers.norm import norm_of
from baton.worker.layers.spec import ExpertsSpec, MlpSpec, NormSpec
from baton.worker.quantization.base import Params
from baton.worker.quantization.experts import ExpertsMethod
from baton.worker.quantization.neighbours import Norm, Stream


@dataclass(frozen=True, slots=True)
class StackedWeights:
    """The parameters of all experts' linears in their format."""

    method: ExpertsMethod
    params: Params
    name: str = ""  # the prefix of their layer's names in the checkpoint


@dataclass(frozen=True, slots=True)
class SharedExpertWeights:
    """The expert that all tokens share."""

    gate_up: LinearWeights  # [2 * intermediate_size, hidden_size], gates first; without gates half as many rows
    down: LinearWeights  # [hidden_size, intermediate_size]
    output_gate: LinearWeights | None  # [1, hidden_size]


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """Vectors and linears of one layer's router and experts."""

    input_norm: Tensor | None  # [hidden_size]
    router: LinearWeights  # [num_experts, hidden_size], fp32 if spec.router_in_fp32
    correction: Tensor | None  # [num_experts] fp32, added to scores for the choice of experts
    experts: StackedWeights
    shared: SharedExpertWeights | None
    output_norm: Tensor | None  # [hidden_size]


class Experts:
    """norm -> router -> experts, and the shared one -> norm -> residual stream"""

    def __init__(
        self, spec: ExpertsSpec, weights: ExpertsWeights, norm: NormSpec, scale: float, device: Device[Any]
    ) -> None:
        self._spec = spec
        self._kernels = device.kernels
        self._input_norm = norm_of(weights.input_norm, norm)
        self._output_norm = norm_of(weights.output_norm, norm)
        self._router = Linear(weights.router, device)
        self._correction = weights.correction
        self._params = weights.experts.params
        self._ops = device.experts_ops(weights.experts.method, weights.experts.name)
        self._shared = None
        if weights.shared is not None:
            assert spec.shared is not None, "weights are built by the layer's spec"
            self._shared = _SharedExpert(spec.shared, weights.shared, device)
        self._scale = scale
        # Without a norm, the shared expert would read what the others have changed.
        apart = self._shared is None or self._input_norm is not None
        self._adds_plain_sum = apart and self._output_norm is None and scale == 1
        self._may_fuse = self._adds_plain_sum and self._shared is None and not spec.gate.squares

    def add(self, stream: Stream) -> None:
        """Adds the experts' sum to the stream."""
        norm, num_pairs = self._input_norm, len(stream.residual) * self._spec.router.top_k
        may_fuse = self._may_fuse and stream.fuse_norms and stream.update is None
        if may_fuse and norm is not None and not norm.centered and self._ops.fuses_norm(self._params, num_pairs):
            weights, ids = self._route(stream, norm)
            self._ops.add_normed(self._params, stream, norm, weights, ids, self._spec.gate)
            return
        x = stream.normed(norm, self._kernels)
        weights, ids = self._route(Stream(x, fuse_norms=stream.fuse_norms), None)
        if self._adds_plain_sum:
            self._ops.add(self._params, x, weights, ids, self._spec.gate, stream)
            if self._shared is not None:
                self._shared.add(x, stream)
            return
        update = self._ops.run(self._params, x, weights, ids, self._spec.gate)
        if self._shared is not None:
            update.add_(self._shared.of(x, fuse=stream.fuse_norms))
        if self._output_norm is not None:
            update = self._output_norm.apply(update, self._kernels)
        stream.add(update if self._scale == 1 else update.mul_(self._scale))

    def _route(self, stream: Stream, norm: Norm | None) -> tuple[Tensor, Tensor]:
        if self._spec.router_in_fp32:
            logits = self._router.multiply_wide(stream.normed(norm, self._kernels))
        else:
            logits = self._router.project(stream, norm)
        return self._kernels.route(logits, self._correction, self._spec.router)


class _SharedExpert:
    def __init__(self, spec: MlpSpec, weights: SharedExpertWeights, device: Device[Any]) -> None:
        self._spec = spec
        self._kernels = device.kernels
        self._gate_up = Linear(weights.gate_up, device)
        self._down = Linear(weights.down, device)
        self._output_gate = None if weights.output_gate is None else Linear(weights.output_gate, device)

    def add(self, x: Tensor, stream: Stream) -> None:
        """Adds the shared expert's output to the stream."""
        if self._output_gate is None:
            self._down.add(self._gate(x, stream.fuse_norms), stream, 1.0)
        else:
            stream.add(self.of(x, fuse=stream.fuse_norms))

    def of(self, x: Tensor, *, fuse: bool) -> Tensor:
        """Returns the shared expert's output, [num_tokens, hidden_size]. `fuse`: as a Stream's `fuse_norms`."""
        out = self._down.multiply(self._gate(x, fuse))
        return out if self._output_gate is None else out.mul_(self._kernels.sigmoid(self._output_gate.multiply(x)))

    def _gate(self, x: Tensor, fuse: bool) -> Tensor:
        stream = Stream(x, fuse_norms=fuse)
        if self._spec.gated:
            return self._gate_up.gate(stream, None)
        return self._gate_up.activate(stream, None, self._spec.activation)
