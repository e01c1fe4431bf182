"""The interface of weight formats of experts, as base has it for one linear."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton.kernels.reference.moe.experts import gated_by
from baton.kernels.routing import Gate
from baton.worker.quantization.base import Finish, Params, Source
from baton.worker.quantization.expert_names import ExpertNames
from baton.worker.quantization.neighbours import Kernels, Norm, Stream

GATE_UP, DOWN = "gate_up", "down"  # the linears of an expert


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The experts of one layer."""

    names: ExpertNames
    prefix: str  # of the names
    num_experts: int
    hidden_size: int
    intermediate_size: int
    bias: bool = False
    gate: Gate = Gate()  # noqa: RUF009 - frozen

    @property
    def gate_up_size(self) -> int:
        """Rows of an expert's gates and ups, or of its ups alone."""
        return self.gate.num_parts * self.intermediate_size


class ExpertsOps(ABC):
    """A format's ops on a device."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def reset(self) -> None:  # noqa: B027 - most formats have no scratch memory
        """Restores scratch memory after a failed step."""

    @abstractmethod
    def run(self, params: Params, x: Tensor, weights: Tensor, ids: Tensor, gate: Gate) -> Tensor:
        """Returns the sum of each token's experts `ids` by `weights`, both [num_tokens, top_k]."""

    @abstractmethod
    def product(self, params: Params, linear: str, rows: Tensor, ids: Tensor) -> Tensor:
        """Returns the rows [num_pairs, k] of pairs, in the order of `ids` [num_tokens, top_k], times their experts'
        matrices of a linear, `gate_up` (gates first) or `down`, plus their biases."""

    def run_by_products(self, params: Params, x: Tensor, weights: Tensor, ids: Tensor, gate: Gate) -> Tensor:
        """Returns what `run` does, by a product for each linear: of gates that no fused kernel has."""
        rows = x.repeat_interleave(ids.shape[1], 0)
        gated = gated_by(self.product(params, GATE_UP, rows, ids), gate)
        out = self.product(params, DOWN, gated, ids)
        return out.view(*ids.shape, -1).mul(weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def add(self, params: Params, x: Tensor, weights: Tensor, ids: Tensor, gate: Gate, stream: Stream) -> None:
        """Adds what `run` returns to the stream."""
        stream.add(self.run(params, x, weights, ids, gate))

    def fuses_norm(self, params: Params, num_pairs: int) -> bool:
        """Returns whether `add_normed` is faster than a norm and `add`."""
        return False

    def add_normed(self, params: Params, stream: Stream, norm: Norm, weights: Tensor, ids: Tensor, gate: Gate) -> None:
        """Adds the experts of the normed stream to the stream."""
        self.add(params, stream.normed(norm, self.kernels), weights, ids, gate, stream)


class ExpertsMethod(Protocol):
    """A weight format."""

    @property
    def name(self) -> str:
        """The name in the registry."""

    def create(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> Params:
        """Allocates the parameters of all experts."""

    def load(self, params: Params, shape: ExpertsShape, source: Source) -> Finish | None:
        """Fills the parameters from a checkpoint. Returns what completes them, if anything."""

    def on_cpu(self, kernels: Kernels) -> ExpertsOps:
        """Returns the format's ops on a CPU."""

    def on_cuda(self, kernels: Kernels, device: torch.device, *, batch_invariant: bool) -> ExpertsOps:
        """Returns the format's ops on a GPU."""
