"""Transports of KV between GPUs of this machine and to others: NVLink, RDMA, NCCL, NIXL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from baton.services.doctor.finding import Finding, failed, ok, unknown, warning
from baton.services.doctor.targets import Targets
from baton.services.machine.programs import run

_TOPIC = "fabric"
_INFINIBAND = Path("/sys/class/infiniband")
_LINK = re.compile(r"Link \d+: ([\d.]+) GB/s")
_DOWN = re.compile(r"Link \d+: <inactive>")


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device, as the kernel reports it."""

    name: str  # device/port
    state: str  # ACTIVE, DOWN, ...
    kind: str  # InfiniBand or Ethernet
    rate: str


@dataclass(frozen=True, slots=True)
class FabricFacts:
    """The transports of this machine. The version of a missing package is empty."""

    has_gpus: bool
    nvlinks_up: int
    nvlinks_down: int
    nvlink_problem: str  # reason why nvidia-smi did not report links
    ports: tuple[RdmaPort, ...]
    nccl: str
    nixl: str
    peer_memory: bool  # the kernel module for access of RDMA devices to GPU memory


def check_fabric(facts: FabricFacts, targets: Targets) -> Iterator[Finding]:
    """Checks whether the requested transports are available."""
    if targets.service not in ("", "worker"):
        return
    if facts.has_gpus:
        yield _nvlink(facts)
    yield from _rdma(facts, "rdma" in targets.transports)
    yield from _packages(facts, targets)


def observe_fabric(seconds: float, has_gpus: bool, root: Path = _INFINIBAND) -> FabricFacts:
    """Reads the kernel's files and the installed packages, and calls nvidia-smi if there are GPUs."""
    links = run(["nvidia-smi", "nvlink", "--status"], seconds) if has_gpus else None
    text = links.text if links is not None and links.code == 0 else ""
    return FabricFacts(
        has_gpus=has_gpus,
        nvlinks_up=len(_LINK.findall(text)),
        nvlinks_down=len(_DOWN.findall(text)),
        nvlink_problem=links.problem if links is not None else "",
        ports=tuple(_ports(root)),
        nccl=_version("nvidia-nccl-cu13") or _version("nvidia-nccl-cu12"),
        nixl=_version("nixl-cu13"),
        peer_memory=any(Path("/sys/module", name).exists() for name in ("nvidia_peermem", "nv_peer_mem")),
    )


def _nvlink(facts: FabricFacts) -> Finding:
    if facts.nvlink_problem:
        return unknown(_TOPIC, f"NVLink: {facts.nvlink_problem}")
    if facts.nvlinks_down:
        what = f"NVLink: {facts.nvlinks_down} links are inactive, {facts.nvlinks_up} are up"
        return warning(_TOPIC, what, "systemctl status nvidia-fabricmanager; nvidia-smi nvlink --errorcounters")
    return ok(_TOPIC, f"NVLink: {facts.nvlinks_up} links are up" if facts.nvlinks_up else "NVLink: none; PCIe is used")


def _rdma(facts: FabricFacts, wanted: bool) -> Iterator[Finding]:
    up = [port for port in facts.ports if port.state == "ACTIVE"]
    for port in facts.ports:
        if port in up:
            yield ok(_TOPIC, f"RDMA {port.name}: {port.kind}, {port.rate}")
        elif not up and wanted:
            yield failed(
                _TOPIC, f"RDMA {port.name} is {port.state}", "ibstat; the cable, the switch, the subnet manager"
            )
        else:
            yield warning(_TOPIC, f"RDMA {port.name} is {port.state}", "ibstat, unless it is not used")
    if not facts.ports:
        what = "RDMA: no device in /sys/class/infiniband"
        fix = "--transports nccl,tcp; containers need the device plugin's resource (rdma/...)"
        yield failed(_TOPIC, f"{what}, and --transports asks for it", fix) if wanted else ok(_TOPIC, what)
    if up and facts.has_gpus and not facts.peer_memory:
        what = "RDMA does not reach GPU memory: no nvidia_peermem"
        yield warning(_TOPIC, what, "modprobe nvidia_peermem; drivers with dma-buf and NIXL's CUDA build need none")


def _packages(facts: FabricFacts, targets: Targets) -> Iterator[Finding]:
    for name, version, fix in (
        ("nccl", facts.nccl, "pip install 'baton-inference[cuda]'"),
        ("rdma", facts.nixl, "pip install 'baton-inference[rdma]'"),
    ):
        package = "NCCL" if name == "nccl" else "NIXL"
        if version:
            yield ok(_TOPIC, f"{package} {version}")
        elif name in targets.transports:
            yield failed(_TOPIC, f"--transports asks for {name}, and {package} is not installed", fix)
        elif targets.executor == "cuda" and not targets.transports:
            yield warning(_TOPIC, f"{package} is not installed: KV does not move by {name}", fix)


def _ports(root: Path) -> Iterator[RdmaPort]:
    for port in sorted(root.glob("*/ports/*")):
        yield RdmaPort(
            name=f"{port.parent.parent.name}/{port.name}",
            state=_read(port / "state").rpartition(":")[2].strip() or "unreadable",
            kind=_read(port / "link_layer"),
            rate=_read(port / "rate"),
        )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
