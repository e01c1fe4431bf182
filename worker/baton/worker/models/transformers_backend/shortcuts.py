"""Faster forms of a model's parts: the linears and RMSNorms that a device's kernels compute too."""

from __future__ import annotations

import copy
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from baton.kernels.reference.norm.rms_norm import rms_norm
from baton.worker.layers.device import Device
from baton.worker.layers.linear import Linear, LinearWeights
from baton.worker.models.decoder import Step
from baton.worker.models.transformers_backend.attention import RunningStep
from baton.worker.quantization.neighbours import Kernels, Norm, Stream
from baton.worker.quantization.registry import UNQUANTIZED

S = TypeVar("S", bound=Step)

_WIDTH_STEP = 16  # of a GPU's kernels
_PROBE_SIZE = 32
_TOLERANCE = 1e-5


def shorten(module: nn.Module, device: Device[S], running: RunningStep[S]) -> None:
    """Replaces the forward of linears and norms. Call again when the module has got other weights."""
    norms = _Norms()
    for part in module.modules():
        if type(part) is nn.Linear:
            if _fits(part):
                vars(part)["forward"] = _LinearForward(part, device, running)
        elif (eps := norms.eps_of(part)) is not None:
            vars(part)["forward"] = _NormForward(part, eps, device.kernels)


def _fits(part: nn.Linear) -> bool:
    """Returns whether the device's ops take the sizes."""
    on_cpu = part.weight.device.type == "cpu"
    return on_cpu or (part.in_features % _WIDTH_STEP == 0 and part.out_features % _WIDTH_STEP == 0)


class _LinearForward(Generic[S]):
    """x @ weight^T + bias"""

    __slots__ = ("_linear", "_running")

    def __init__(self, part: nn.Linear, device: Device[S], running: RunningStep[S]) -> None:
        params: dict[str, Tensor] = UNQUANTIZED.over(part.weight, part.bias)  # type: ignore[assignment]
        self._linear = Linear(LinearWeights(UNQUANTIZED, params), device)
        self._running = running

    def __call__(self, x: Tensor) -> Tensor:
        step = self._running.step
        # Without a step it is the head, whose kernel may depend on the number of rows.
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        stream = Stream(rows, fuse_norms=step is None or step.fuse_norms)
        return self._linear.project(stream, None).view(*x.shape[:-1], -1)


class _NormForward:
    """x / sqrt(mean(x^2) + eps) * weight"""

    __slots__ = ("_kernels", "_norm", "_part")

    def __init__(self, part: nn.Module, eps: float, kernels: Kernels) -> None:
        self._part = part
        self._norm = Norm(part.get_parameter("weight"), eps)
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self._norm.weight.dtype:
            promoted: Tensor = type(self._part).forward(self._part, x)
            return promoted
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._norm.apply(rows, self._kernels).view(x.shape)


class _Norms:
    """Finds RMSNorms by what they compute, because each architecture has a class of its own."""

    def __init__(self) -> None:
        self._found: dict[tuple[type[nn.Module], float], bool] = {}

    def eps_of(self, part: nn.Module) -> float | None:
        """Returns the epsilon of an RMSNorm; None for anything else."""
        eps = getattr(part, "variance_epsilon", getattr(part, "eps", None))
        weight = part._parameters.get("weight")
        if not isinstance(eps, float) or weight is None or weight.dim() != 1 or len(part._parameters) != 1:
            return None
        key = (type(part), eps)
        if key not in self._found:
            self._found[key] = not part._modules and _is_rms_norm(part, eps)
        return eps if self._found[key] else None


def _is_rms_norm(part: nn.Module, eps: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(shape, generator=generator) for shape in ((_PROBE_SIZE,), (3, _PROBE_SIZE)))
    x *= torch.tensor([[1.0], [1e-2], [1e-3]])  # of the small ones, epsilon is a large part
    probe: Any = copy.copy(part)
    vars(probe).pop("forward", None)
    probe._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    try:
        with torch.device("cpu"):
            found = probe.forward(x)
    except (RuntimeError, TypeError, AttributeError):
        return False  # it takes other arguments, or another size
    expected = rms_norm(x, weight, eps)
    return isinstance(found, Tensor) and found.shape == expected.shape and _close(found, expected)


def _close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())
