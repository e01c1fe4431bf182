"""The half of a layer that keeps a state of its sequence: its weights, and the order of its ops on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from baton.worker.layers.device import Device, StateTensors
from baton.worker.layers.linear import Linear, LinearWeights, OutputLinear
from baton.worker.layers.norm import norm_of
from baton.worker.layers.spec import NormSpec
from baton.worker.layers.state_spec import StateSpec
from baton.worker.quantization.neighbours import Stream

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class StateWeights:
    """The weights of one layer."""

    input_norm: Tensor | None  # [hidden_size]
    proj: LinearWeights  # [sum(first_sizes), hidden_size]
    tensors: StateTensors
    o: LinearWeights  # [hidden_size, attended_size]
    output_norm: Tensor | None  # [hidden_size]
    ups: tuple[LinearWeights, ...] = ()  # [each of up_sizes, each of up_ranks]


class Recurrent(Generic[S]):
    """norm -> linears -> convolution -> recurrence -> gated norm -> linear -> residual stream"""

    attend_writes: ClassVar[bool] = True  # `attend` replaces the states

    def __init__(
        self,
        index: int,
        spec: StateSpec,
        weights: StateWeights,
        norm: NormSpec,
        scale: float,
        device: Device[S],
        *,
        norms_sum: bool = False,
    ) -> None:
        self._input_norm = norm_of(weights.input_norm, norm)
        self._proj = Linear(weights.proj, device)
        self._ups = [Linear(up, device) for up in weights.ups]
        self._up_ranks = spec.up_ranks
        self._ops = device.recurrence(index, spec, weights.tensors)
        self._o = OutputLinear(weights.o, norm_of(weights.output_norm, norm), scale, device, norms_sum=norms_sum)

    def project(self, stream: Stream, step: S, out: Tensor | None) -> Tensor:
        """Returns what `attend` takes, in `out` if given."""
        if not self._ups:
            return self._proj.project(stream, self._input_norm, out)
        made = self._proj.project(stream, self._input_norm)
        wide, *low = torch.split(made, [made.shape[1] - sum(self._up_ranks), *self._up_ranks], 1)
        parts = [up.project(Stream(part.contiguous()), None) for up, part in zip(self._ups, low, strict=True)]
        return torch.cat([wide, *parts], 1, out=out)

    def attend(self, query: Tensor, step: S, out: Tensor | None) -> Tensor:
        """Replaces the step's states. Returns [num_tokens, attended_size]."""
        assert out is None, "segments of models with states are not recorded"
        return self._ops.mix(query, step)

    def finish(self, stream: Stream, attended: Tensor) -> None:
        """Adds the output projection of `attended` to the stream."""
        self._o.add(attended, stream)
