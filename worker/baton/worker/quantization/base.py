"""The interface of weight formats. Only a format reads its parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from baton.kernels.packed.weight import PackedWeight
from baton.worker.quantization.neighbours import Kernels, Norm, Stream

# Fills a view with the checkpoint's tensor of a name and shape, or raises InvalidRequest. The view has the tensor's
# elements in their order, but may divide a dimension into several, and have any strides. A view of bytes gets those of
# the file's blocks. It is filled by the end of the load, not at once: tensors are read in the order of the files.
Source = Callable[[str, tuple[int, ...], Tensor], None]
Params = Mapping[str, Tensor]
# Completes parameters once the source has filled all views. Raises InvalidRequest for values that cannot be right.
Finish = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Staged:
    """A Finish that converts unquantized tensors, which take memory until it has run."""

    finish: Finish
    num_bytes: int

    def __call__(self) -> None:
        self.finish()


# Most formats leave routers, heads and tables (embeddings) as they are.
LinearKind = Literal["layer", "router", "head", "table"]


class Part(NamedTuple):
    """Rows of a linear that are one tensor in the checkpoint."""

    name: str  # without ".weight"
    rows: int


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The parts of a linear, in the order of its rows, and their common properties."""

    parts: Sequence[Part]
    in_features: int
    bias: bool = False
    kind: LinearKind = "layer"

    @property
    def out_features(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts)


class LinearOps(ABC):
    """A format's ops on a device. `multiply` is required; a format overrides the ops that it can fuse."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def reset(self) -> None:  # noqa: B027 - most formats have no scratch memory
        """Restores scratch memory after a failed step."""

    def prepared(self, params: Params) -> Params:
        """Returns the parameters as the other ops take them, which may be copies."""
        return params

    @abstractmethod
    def multiply(self, params: Params, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns x @ weight^T + bias."""

    def multiply_wide(self, params: Params, x: Tensor) -> Tensor:
        """Returns x @ weight^T + bias in fp32, of weights in fp32."""
        return self.multiply(params, x.float())

    def project(self, params: Params, stream: Stream, norm: Norm | None, out: Tensor | None = None) -> Tensor:
        """Returns the linear of the normed stream."""
        return self.multiply(params, stream.normed(norm, self.kernels), out)

    def gate(self, params: Params, stream: Stream, norm: Norm | None) -> Tensor:
        """Returns silu(first half) * second half of the linear of the normed stream."""
        return self.kernels.silu_mul(self.project(params, stream, norm))

    def activate(self, params: Params, stream: Stream, norm: Norm | None, activation: str) -> Tensor:
        """Returns activation(linear) of the normed stream."""
        return self.kernels.activate(self.project(params, stream, norm), activation, gated=False)

    def fuses_gate(self, params: Params, like: Tensor) -> bool:
        """Returns whether `add_gated` is faster, for as many tokens as `like` has, than a gate and `add`."""
        return False

    def add_gated(self, params: Params, gate_up: Tensor, stream: Stream, scale: float = 1.0) -> None:
        """Adds scale * linear(silu(first half) * second half of gate_up) to the stream."""
        self.add(params, self.kernels.silu_mul(gate_up), stream, scale)

    def add(self, params: Params, x: Tensor, stream: Stream, scale: float = 1.0) -> None:
        """Adds scale * linear(x) to the stream."""
        update = self.multiply(params, x)
        stream.add(update if scale == 1 else update.mul_(scale))


class QuantMethod(Protocol):
    """A weight format."""

    @property
    def name(self) -> str:
        """The name in the registry."""

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> Params:
        """Allocates a linear's parameters."""

    def load(self, params: Params, shape: LinearShape, source: Source) -> Finish | None:
        """Fills the parameters from a checkpoint. Returns what completes them, if anything."""

    def on_cpu(self, kernels: Kernels) -> LinearOps:
        """Returns the format's ops on a CPU."""

    def on_cuda(self, kernels: Kernels, device: torch.device, *, batch_invariant: bool) -> LinearOps:
        """Returns the format's ops on a GPU, with scratch memory of their own. With `batch_invariant`, a row's result
        does not depend on the other rows, bit for bit."""


class TableMethod(QuantMethod, Protocol):
    """A weight format that embeddings may have: rows are read one by one."""

    def out_features(self, params: Params) -> int:
        """Returns the number of rows."""

    def taken(self, params: Params, ids: Tensor) -> Tensor:
        """Returns rows on a CPU, [num_ids, columns] fp32."""

    def packed_weight(self, params: Params) -> PackedWeight:
        """Returns the matrix as the GPU's kernels read it. Raises Unsupported if they do not."""
