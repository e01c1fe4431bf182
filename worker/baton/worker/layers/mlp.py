"""The MLP half of a decoder layer: its weights, and the order of its ops on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from baton.worker.layers.device import Device
from baton.worker.layers.linear import Linear, LinearWeights, OutputLinear
from baton.worker.layers.norm import norm_of
from baton.worker.layers.spec import MlpSpec, NormSpec
from baton.worker.quantization.neighbours import Stream


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """The weights of one layer's MLP."""

    input_norm: Tensor | None  # [hidden_size]
    gate_up: LinearWeights  # [2 * intermediate_size, hidden_size], gates first; without gates half as many rows
    down: LinearWeights  # [hidden_size, intermediate_size]
    output_norm: Tensor | None  # [hidden_size]


class Mlp:
    """norm -> activation(gate) * up -> down -> norm -> residual stream"""

    def __init__(
        self,
        spec: MlpSpec,
        weights: MlpWeights,
        norm: NormSpec,
        scale: float,
        device: Device[Any],
        *,
        norms_sum: bool = False,
    ) -> None:
        self._spec = spec
        self._kernels = device.kernels
        self._input_norm = norm_of(weights.input_norm, norm)
        self._gate_up = Linear(weights.gate_up, device)
        self._down = OutputLinear(weights.down, norm_of(weights.output_norm, norm), scale, device, norms_sum=norms_sum)

    def add(self, stream: Stream) -> None:
        """Adds the MLP's output to the stream."""
        spec = self._spec
        if spec.gated and spec.activation == "silu" and self._down.fuses_gate(stream.residual):
            self._down.add_gated(self._gate_up.project(stream, self._input_norm), stream)
            return
        self._down.add(self._activated(stream), stream)

    def _activated(self, stream: Stream) -> Tensor:
        spec = self._spec
        if spec.gated and spec.activation == "silu":
            return self._gate_up.gate(stream, self._input_norm)
        if not spec.gated:
            return self._gate_up.activate(stream, self._input_norm, spec.activation)
        projected = self._gate_up.project(stream, self._input_norm)
        return self._kernels.activate(projected, spec.activation, gated=True)
