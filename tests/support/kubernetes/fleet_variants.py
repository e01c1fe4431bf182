"""Variants of the overlays, changed as deploy/README.md describes: other components, settings, or another namespace."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from support.kubernetes.deploy_tools import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
_BUILD = ROOT / "build" / "deploy"
_UP = "../../../deploy/kubernetes"  # kustomize accepts only relative paths


@dataclass(frozen=True)
class Variant:
    """Changes to a copy of an overlay."""

    overlay: str
    swap: Mapping[str, str] = field(default_factory=dict)  # component: its replacement
    add: tuple[str, ...] = ()
    settings: Mapping[str, str | None] = field(default_factory=dict)  # None removes the setting
    replacements: bool = False  # uncomment the overlay's `replacements`
    namespace: str = "baton"


_AGGREGATED: Mapping[str, str | None] = {
    "prefillWorkers": None,
    "decodeWorkers": None,
    "maxPrefillWorkers": None,
    "maxDecodeWorkers": None,
    "workers": "5",
    "maxWorkers": "12",
}

VARIANTS = {
    "production-keda": Variant("production", swap={"hpa": "keda"}, replacements=True),
    "production-keda-elsewhere": Variant("production", swap={"hpa": "keda"}, replacements=True, namespace="elsewhere"),
    "production-aggregated": Variant(
        "production", swap={"disaggregated": "aggregated", "hpa": "hpa-aggregated"}, settings=_AGGREGATED
    ),
    "production-aggregated-keda": Variant(
        "production",
        swap={"disaggregated": "aggregated", "hpa": "keda-aggregated"},
        settings=_AGGREGATED,
        replacements=True,
    ),
    "production-external-redis": Variant("production", swap={"redis-tls": "external-redis"}),
    "production-gateway-api": Variant("production", add=("gateway-api-tls",)),
    "production-monitored": Variant("production", add=("pod-monitors-tls",)),
    "production-rdma": Variant("production", add=("rdma",), settings={"transports": "rdma,nccl,tcp"}),
    "gpu-external-redis": Variant("gpu", add=("external-redis",)),
    "gpu-gateway-api": Variant("gpu", add=("gateway-api",)),
    "gpu-monitored": Variant("gpu", add=("pod-monitors",)),
}


@functools.cache
def folder_of(name: str) -> Path:
    """Returns the folder of an overlay or variant. Writes a variant first."""
    return write(name, VARIANTS[name]) if name in VARIANTS else KUBERNETES / "overlays" / name


def wrapped(name: str, namespace: str, **more: object) -> Path:
    """Writes a kustomization that moves an overlay or variant to another namespace."""
    inner = f"../{folder_of(name).name}" if name in VARIANTS else f"{_UP}/overlays/{name}"
    return _written(f"{name}-in-{namespace}", {"namespace": namespace, "resources": [inner], **more})


def commented_replacements(overlay: Path) -> object:
    """Returns the `replacements` that an overlay's kustomization has in a comment."""
    _, head, block = (overlay / "kustomization.yaml").read_text().partition("# replacements:\n")
    assert head, f"{overlay} has no commented replacements"
    lines = [line.removeprefix("# ") for line in block.splitlines() if line.startswith("#  ")]
    return yaml.safe_load("\n".join(lines))


def write(name: str, variant: Variant) -> Path:
    """Writes a variant. Returns its folder."""
    source = KUBERNETES / "overlays" / variant.overlay
    text = yaml.safe_load((source / "kustomization.yaml").read_text())
    missing = set(variant.swap) - {Path(one).name for one in text["components"]}
    assert not missing, f"{variant.overlay} has no component {missing}"
    components = [variant.swap.get(Path(one).name, Path(one).name) for one in text["components"]]
    fleet = yaml.safe_load((source / "fleet.yaml").read_text())
    settings = {**fleet["data"], **variant.settings}
    fleet["data"] = {key: value for key, value in settings.items() if value is not None}
    changed = {
        **text,
        "namespace": variant.namespace,
        "resources": [f"{_UP}/base", "fleet.yaml"],
        "components": [f"{_UP}/components/{one}" for one in (*components, *variant.add)],
    }
    if variant.replacements:
        changed["replacements"] = commented_replacements(source)
    return _written(name, changed, fleet)


def _written(name: str, kustomization: Mapping[str, object], fleet: object = None) -> Path:
    folder = _BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    if fleet is not None:
        _replace(folder / "fleet.yaml", yaml.safe_dump(fleet))
    _replace(folder / "kustomization.yaml", yaml.safe_dump(kustomization))
    return folder


def _replace(path: Path, text: str) -> None:
    """Writes a file at once: other test processes may read it."""
    if not path.exists() or path.read_text() != text:
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.replace(path)
