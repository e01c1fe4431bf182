"""What an executor reports of itself at start. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from baton.worker.models.costs import ModelCosts


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The implementation of one operation, for some of its cases."""

    op: str
    kernel: str  # module.function
    where: str = ""  # the cases, in words; empty: all


@dataclass(frozen=True, slots=True)
class Off:
    """What an executor could do, and does not."""

    feature: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A model on a device, when its weights are loaded and its memory is allocated."""

    architecture: str
    implementation: str  # what computes the architecture: baton, or the library whose layers are used
    num_layers: int
    device: str
    dtype: str  # of weights and activations
    weight_format: str
    weight_bytes: int
    step_bytes: int | None = None  # of the largest step, beside the weights; None: not measured
    graph_bytes: int = 0  # estimated, of captured steps
    kernels: tuple[KernelChoice, ...] = ()
    off: tuple[Off, ...] = ()
    costs: ModelCosts | None = None  # None: nothing is computed
