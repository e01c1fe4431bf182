"""The GPUs of this machine as nvidia-smi and PyTorch report them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from baton.services.machine.programs import Output, python, run

LEAST_CAPABILITY = (8, 0)  # of the kernels
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


def _parse_torch(seen: Output) -> Torch | None:
    if seen.code:
        return None
    try:
        version, cuda, available, count = json.loads(seen.text.strip().rpartition("\n")[2])
    except ValueError:
        return None
    return Torch(version, cuda, available, count)
