"""The GPUs of this machine, their driver, and whether PyTorch can use them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from baton.services.doctor.finding import Finding, failed, ok, unknown, warning
from baton.services.doctor.machine.programs import Output, python, run
from baton.services.doctor.targets import Targets

_TOPIC = "gpu"
_LEAST_CAPABILITY = (8, 0)
_SLOW_PART = 0.6  # of the highest clock, under load
_HOT = 87  # degrees
_COLUMNS = (
    "index", "name", "driver_version", "memory.total", "memory.free", "compute_cap",
    "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.hw_slowdown", "temperature.gpu",
)  # fmt: skip
_TORCH = (
    "import json, torch; a = torch.cuda.is_available(); "
    "print(json.dumps([torch.__version__, torch.version.cuda or '', a, torch.cuda.device_count() if a else 0]))"
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi reports it. None: not reported."""

    index: int
    name: str
    driver: str
    total_mib: int | None
    free_mib: int | None
    capability: tuple[int, int] | None
    uncorrected_errors: int | None
    slowed_down: bool
    celsius: int | None


@dataclass(frozen=True, slots=True)
class Torch:
    """PyTorch's support of GPUs."""

    version: str
    cuda: str  # version of the build; empty: a build for CPUs
    available: bool
    count: int


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """All GPUs. `problem` is the error of nvidia-smi, `torch_problem` that of PyTorch."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""
    torch: Torch | None = None
    torch_problem: str = ""


def check_gpus(facts: GpuFacts, targets: Targets) -> Iterator[Finding]:
    """Reports GPUs. Without --executor cuda, a machine without GPUs is not a problem."""
    wanted = targets.executor == "cuda"
    if not facts.gpus:
        yield _none(facts, wanted)
    for gpu in facts.gpus:
        yield from _gpu(gpu)
    if facts.torch is not None or facts.torch_problem or wanted:
        yield _torch(facts, wanted)


def observe_gpus(seconds: float, with_torch: bool) -> GpuFacts:
    """Queries nvidia-smi, and PyTorch in a separate process, so that neither can block this one."""
    output = run(["nvidia-smi", f"--query-gpu={','.join(_COLUMNS)}", "--format=csv,noheader,nounits"], seconds)
    gpus = parse_gpus(output.text) if output.code == 0 else ()
    problem = "" if output.code == 0 else output.problem
    if not with_torch:
        return GpuFacts(gpus, problem)
    seen = python(_TORCH, seconds * 4)
    return GpuFacts(gpus, problem, _parse_torch(seen), seen.problem if seen.code else "")


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parses the lines of nvidia-smi's CSV. Skips malformed ones."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return tuple(_parsed(row) for row in rows if len(row) == len(_COLUMNS) and row[0].isdecimal())


def _parsed(row: list[str]) -> Gpu:
    major, dot, minor = row[5].partition(".")
    capable = bool(dot) and major.isdecimal() and minor.isdecimal()
    return Gpu(
        index=int(row[0]),
        name=row[1],
        driver=row[2],
        total_mib=_number(row[3]),
        free_mib=_number(row[4]),
        capability=(int(major), int(minor)) if capable else None,
        uncorrected_errors=_number(row[6]),
        slowed_down=row[7] == "Active",
        celsius=_number(row[8]),
    )


def _number(cell: str) -> int | None:
    return int(cell) if cell.isdecimal() else None


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
    if gpu.capability is not None and gpu.capability < _LEAST_CAPABILITY:
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


def _parse_torch(seen: Output) -> Torch | None:
    if seen.code:
        return None
    try:
        version, cuda, available, count = json.loads(seen.text.strip().rpartition("\n")[2])
    except ValueError:
        return None
    return Torch(version, cuda, available, count)
