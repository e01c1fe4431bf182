"""The GPUs of this machine, their driver, and whether PyTorch can use them."""

from __future__ import annotations

from collections.abc import Iterator

from baton.services.doctor.finding import Finding, failed, ok, unknown, warning
from baton.services.doctor.targets import Targets
from baton.services.machine.gpus import LEAST_CAPABILITY, Gpu, GpuFacts

_TOPIC = "gpu"
_SLOW_PART = 0.6  # of the highest clock, under load
_HOT = 87  # degrees


def check_gpus(facts: GpuFacts, targets: Targets) -> Iterator[Finding]:
    """Reports GPUs. Without --executor cuda, a machine without GPUs is not a problem."""
    wanted = targets.executor == "cuda"
    if not facts.gpus:
        yield _none(facts, wanted)
    for gpu in facts.gpus:
        yield from _gpu(gpu)
    if facts.torch is not None or facts.torch_problem or wanted:
        yield _torch(facts, wanted)


def _none(facts: GpuFacts, wanted: bool) -> Finding:
    why = facts.problem or "nvidia-smi lists none"
    if not wanted:
        return ok(_TOPIC, f"no NVIDIA GPU ({why}); --executor cpu and sim need none")
    fix = (
        "install the driver; containers: --gpus all, or nvidia.com/gpu in the pod's limits; without one: --executor cpu"
    )
    return failed(_TOPIC, f"--executor cuda, and no NVIDIA GPU ({why})", fix)


def _gpu(gpu: Gpu) -> Iterator[Finding]:
    name = f"GPU {gpu.index} {gpu.name}"
    if gpu.capability is not None and gpu.capability < LEAST_CAPABILITY:
        major, minor = gpu.capability
        yield failed(_TOPIC, f"{name}: compute capability {major}.{minor}", "take one of 8.0 or newer: A100, L4, H100")
    if gpu.uncorrected_errors:
        what = f"{name}: {gpu.uncorrected_errors} uncorrected memory errors since the driver was loaded"
        yield failed(_TOPIC, what, f"nvidia-smi --gpu-reset -i {gpu.index} with nothing on it; coming back: replace it")
    if gpu.slowed_down or (gpu.celsius or 0) >= _HOT:
        heat = "" if gpu.celsius is None else f", {gpu.celsius} degrees"
        yield warning(
            _TOPIC, f"{name}: the hardware slows it down{heat}", "nvidia-smi -q -d PERFORMANCE; cooling, power"
        )
    memory = "unknown memory" if gpu.total_mib is None else f"{gpu.free_mib} of {gpu.total_mib} MiB free"
    yield ok(_TOPIC, f"{name}: driver {gpu.driver}, {memory}")


def _torch(facts: GpuFacts, wanted: bool) -> Finding:
    torch = facts.torch
    if torch is None:
        why = facts.torch_problem or "it returned nothing"
        fix = "pip install 'baton-inference[worker]'"
        return failed(_TOPIC, f"torch cannot be asked: {why}", fix) if wanted else unknown(_TOPIC, f"torch: {why}", fix)
    if torch.available:
        return ok(_TOPIC, f"torch {torch.version} sees {torch.count} GPUs")
    if not wanted and not facts.gpus:
        return ok(_TOPIC, f"torch {torch.version}, without GPUs")
    if not torch.cuda:
        fix = "pip install 'torch' from the package index's CUDA builds"
        what = f"torch {torch.version} is a build for CPUs"
        return failed(_TOPIC, what, fix) if wanted else warning(_TOPIC, what, fix)
    what = f"torch {torch.version} for CUDA {torch.cuda} sees no GPU"
    fix = f"a driver for CUDA {torch.cuda} (nvidia-smi shows its highest), or CUDA_VISIBLE_DEVICES, which may hide them"
    return failed(_TOPIC, what, fix) if wanted else warning(_TOPIC, what, fix)
