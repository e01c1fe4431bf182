"""Environments of clients: made from a package registry once, then kept in a cache folder outside the checkout."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.processes import node

# Packages that were uploaded later are not installed: dependencies without a pin stay the same.
AS_OF = "2026-11-25"
UV = "uv==0.13.9"
INSTALL_SECONDS = 600

_AWAY = re.compile(
    r"error sending request|failed to fetch|could not connect|connection (refused|reset|error)|dns error|timed out"
    r"|temporary failure in name resolution|max retries exceeded|network is unreachable"
    r"|E(CONNREFUSED|CONNRESET|NOTFOUND|TIMEDOUT|AI_AGAIN|SOCKETTIMEDOUT|NETUNREACH|HOSTUNREACH)|status code 50[234]"
    r"|\b50[234] (bad gateway|service unavailable|gateway time-?out)",
    re.IGNORECASE,
)


class RegistryAway(Exception):
    """A package registry cannot be reached. Later it may be."""


def cache_folder() -> Path:
    """Where environments are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "baton" / "clients"


@dataclass(frozen=True)
class Environment(ABC):
    """What one client is installed from."""

    name: str
    packages: tuple[str, ...]  # requirements with exact versions

    def folder(self) -> Path:
        """The environment, made at the first call. Skips the test where no registry can be reached for that."""
        try:
            return self.made()
        except RegistryAway as away:
            pytest.skip(f"the environment of {self.name} cannot be made: {away}")

    def made(self) -> Path:
        """The environment, made at the first call by whichever process comes first. Raises RegistryAway."""
        made = cache_folder() / f"{self.name}-{self._key()}"
        stamp = made / ".made"
        with _locked(made):
            if not stamp.exists():
                shutil.rmtree(made, ignore_errors=True)
                made.mkdir(parents=True)
                self._make(made)
                stamp.touch()
        return made

    def _key(self) -> str:
        text = "\n".join([repr(self), AS_OF, self._runtime()])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @abstractmethod
    def _runtime(self) -> str:
        """The interpreter, as far as packages depend on it."""

    @abstractmethod
    def _make(self, made: Path) -> None:
        """Installs into an empty folder. Raises RegistryAway, or AssertionError where a registry refuses a package."""


@dataclass(frozen=True)
class PythonEnvironment(Environment):
    """A virtual environment of this Python."""

    def python(self) -> Path:
        return self.folder() / "bin" / "python"

    def program(self, name: str) -> Path:
        return self.folder() / "bin" / name

    def _flags(self) -> list[str]:
        return []

    def _runtime(self) -> str:
        return sys.version

    def _make(self, made: Path) -> None:
        venv.create(made, symlinks=True)
        words = [_uv(), "pip", "install", "--quiet", "--exclude-newer", AS_OF, "--python", made / "bin" / "python"]
        words += self._flags()
        caches = {"UV_CACHE_DIR": str(cache_folder() / "uv"), "UV_HTTP_TIMEOUT": "60"}
        _install([*words, *self.packages], made, caches)


@dataclass(frozen=True)
class PackageFiles(PythonEnvironment):
    """Packages that are read and not run: installed without what they depend on."""

    def _flags(self) -> list[str]:
        return ["--no-deps"]


@dataclass(frozen=True)
class NodeEnvironment(Environment):
    """A folder of npm packages, for the Node.js of a Python wheel: a machine's own may be older than clients need."""

    without: tuple[str, ...] = ("peer",)  # kinds of dependencies that are not installed
    scripts: tuple[str, ...] = ()  # install scripts that run, by path in node_modules

    def program(self, name: str) -> Path:
        return self.folder() / "node_modules" / ".bin" / name

    def node(self) -> Path:
        return node.wheel() / "bin" / "node"

    def _runtime(self) -> str:
        return str(node.wheel())

    def _make(self, made: Path) -> None:
        # Install scripts may download from elsewhere than the registry: only those run that are named.
        flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", f"--before={AS_OF}"]
        flags += [f"--omit={kind}" for kind in self.without]
        path = os.pathsep.join([str(node.wheel() / "bin"), os.environ.get("PATH", os.defpath)])
        words = [*node.npm(node.wheel()), "install", "--prefix", made, *flags]
        _install([*words, *self.packages], made, {"PATH": path})
        for script in self.scripts:
            _install(
                [self.node(), made / "node_modules" / script],
                made / "node_modules" / Path(script).parent,
                {"PATH": path},
            )


def _uv() -> Path:
    """The installer of Python packages: the machine's own, or one in a virtual environment in the cache."""
    if found := shutil.which("uv"):
        return Path(found)
    made = cache_folder() / UV.replace("==", "-")
    with _locked(made):
        program = made / "bin" / "uv"
        if not program.exists():
            venv.create(made, with_pip=True, symlinks=True, clear=True)
            pip = [made / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV]
            _install(pip, made, {})
    return program


def _install(words: Sequence[str | Path], folder: Path, environ: Mapping[str, str]) -> None:
    """Runs an installer with this process's environment, which may name registries and proxies."""
    command = " ".join(map(str, words))
    try:
        done = subprocess.run(
            list(map(str, words)), cwd=folder, env={**os.environ, **environ}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=INSTALL_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RegistryAway(f"{command} took longer than {INSTALL_SECONDS} s") from error
    output = done.stdout + done.stderr
    if done.returncode and (match := _AWAY.search(output)):
        raise RegistryAway(f"{command}: {match[0]}\n{output[-2000:]}")
    assert not done.returncode, f"{command} ended with {done.returncode}:\n{output}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of the folder, which is a file next to it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
