"""The CUDA devices that workers on this machine may use. Does not import torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from baton.services import extras
from baton.services.machine.gpus import LEAST_CAPABILITY, Gpu, observe_gpus

_VISIBLE, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_TORCH_CUDA = re.compile(r"^cuda\b[^=]*= ['\"]([\d.]+)['\"]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Devices:
    """The usable devices; if there are none, `problem` says why."""

    ids: tuple[str, ...] = ()  # each as CUDA_VISIBLE_DEVICES takes it
    summary: str = ""
    problem: str = ""
    order: str = ""  # CUDA_DEVICE_ORDER under which the ids hold; empty: as it is set

    def variables(self, index: int) -> dict[str, str]:
        """Returns the variables that give a process the device at `index` alone."""
        return {_VISIBLE: self.ids[index], **({_ORDER: self.order} if self.order else {})}


def observe_devices(environ: Mapping[str, str], seconds: float) -> Devices:
    """Returns the devices that nvidia-smi, CUDA_VISIBLE_DEVICES and the installed PyTorch leave. Takes `seconds`."""
    facts = observe_gpus(seconds, with_torch=False)
    if not facts.gpus:
        return Devices(problem=f"no NVIDIA GPU ({facts.problem or 'nvidia-smi lists none'})")
    devices = usable_devices(facts.gpus, environ.get(_VISIBLE))
    if devices.ids and not torch_cuda():
        build = f"torch {extras.installed('torch') or 'is missing, or'} is a build without CUDA"
        return Devices(problem=f"{devices.summary}, but {build}")
    return devices


def usable_devices(gpus: Sequence[Gpu], visible: str | None) -> Devices:
    """Returns the GPUs that are visible and new enough. `visible`: CUDA_VISIBLE_DEVICES, or None."""
    old = [gpu for gpu in gpus if gpu.capability is not None and gpu.capability < LEAST_CAPABILITY]
    fit = {str(gpu.index): gpu for gpu in gpus if gpu not in old}
    if not fit:
        major, minor = LEAST_CAPABILITY
        return Devices(problem=f"{_counted(old)}: compute capability below {major}.{minor}")
    if visible is None:
        return Devices(tuple(fit), _counted(list(fit.values())), order="PCI_BUS_ID")  # nvidia-smi's order
    wanted = [word.strip() for word in visible.split(",") if word.strip()]
    # UUIDs of GPUs and of their parts are taken as they are.
    ids = [word for word in wanted if word in fit or not word.lstrip("-").isdecimal()]
    if not ids:
        return Devices(problem=f"{_counted(list(fit.values()))}, but {_VISIBLE}={visible!r} names none of them")
    named = [fit[word] for word in ids if word in fit]
    summary = _counted(named) if len(named) == len(ids) else f"{len(ids)} GPUs"
    return Devices(tuple(ids), f"{summary} of {_VISIBLE}={visible}")


def torch_cuda() -> str:
    """Returns the CUDA version that the installed PyTorch was built for. Empty: none, or no PyTorch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return ""
    try:
        found = _TORCH_CUDA.search((Path(spec.origin).parent / "version.py").read_text(encoding="utf-8"))
    except OSError:
        return ""
    return found[1] if found else ""


def _counted(gpus: Sequence[Gpu]) -> str:
    counts = [(name, len(list(some))) for name, some in groupby(sorted(gpu.name for gpu in gpus))]
    return ", ".join(f"{count} x {name}" for name, count in counts)
