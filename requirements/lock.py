"""The lock files beside this: every package that the product's extras bring, at one version, with its hashes.

    all.lock    every extra, with torch as the package index has it: on Linux its CUDA build and NVIDIA's libraries
    cpu.lock    every extra that needs no GPU, without torch, which is installed from an index of CPU builds
    control.lock, worker.lock, worker-cpu.lock   what images hold, at the versions of all.lock; the last without torch
    build.lock  what makes Baton's own wheel for them

`lock.py make` resolves with uv; `lock.py check` needs no network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parent
PYPROJECT = FOLDER.parent / "pyproject.toml"
NOT_SHIPPED = frozenset({"calibrate", "dev", "docs", "eval", "mistral", "slow-tokenizers"})
GPU_EXTRAS = frozenset({"cuda", "rdma"})
# torch, and what only its CUDA build depends on.
_NOT_ON_CPU = re.compile(r"torch|triton|(nvidia|cuda)-.*")
_FINGERPRINT = re.compile(r"^# made for sha256:([0-9a-f]{64})$", re.MULTILINE)
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class LockFile:
    """One file, and the extras that it is for."""

    name: str
    extras: tuple[str, ...]  # empty: those of [build-system]
    has_torch: bool
    follows: str = ""  # the file whose versions it takes

    @property
    def path(self) -> Path:
        """The path of the file."""
        return FOLDER / self.name


@dataclass(frozen=True, slots=True)
class Pin:
    """One package of a lock file."""

    requirement: Requirement
    num_hashes: int
    text: str  # its lines

    @property
    def version(self) -> str:
        """Empty unless it is held to exactly one."""
        found = [one.version for one in self.requirement.specifier if one.operator == "=="]
        return found[0] if len(found) == 1 and "*" not in found[0] else ""


def lock_files(project: Mapping[str, object]) -> tuple[LockFile, ...]:
    """Returns the lock files that a pyproject.toml's [project] requires."""
    shipped = tuple(sorted(set(_extras(project)) - NOT_SHIPPED - {"all"}))
    on_cpu = tuple(extra for extra in shipped if extra not in GPU_EXTRAS)
    return LockFile("all.lock", shipped, True), LockFile("cpu.lock", on_cpu, False)


def image_files() -> tuple[LockFile, ...]:
    """Returns the lock files that deploy/Dockerfile installs."""
    return (
        LockFile("control.lock", ("gateway", "kubernetes", "router"), False, "all.lock"),
        LockFile("worker.lock", ("cuda", "gguf", "kv-events", "rdma", "worker"), True, "all.lock"),
        LockFile("worker-cpu.lock", ("gguf", "kv-events", "worker"), False, "all.lock"),
        LockFile("build.lock", (), True),
    )


def requirements_of(project: Mapping[str, object], extras: Sequence[str]) -> list[str]:
    """Returns the direct requirements, sorted, with extras of extras. None: the build requirements."""
    if not extras:
        return sorted(_texts(project["build-requires"]))
    own = f"{canonicalize_name(str(project['name']))}["
    found = set(_texts(project["dependencies"]))
    waiting, seen = list(extras), set(extras)
    while waiting:
        for text in _extras(project)[waiting.pop()]:
            if not canonicalize_name(text.partition("[")[0]).startswith(own.rstrip("[")):
                found.add(text)
                continue
            named = set(Requirement(text).extras) - seen
            seen |= named
            waiting += named
    return sorted(found)


def fingerprint(project: Mapping[str, object], extras: Sequence[str]) -> str:
    """Changes with whatever is asked for, and with the Pythons."""
    asked = [str(project["requires-python"]), *requirements_of(project, extras)]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def pins_of(text: str) -> list[Pin]:
    """Returns the packages of a lock file. Raises ValueError for any line but a pin, a comment or a hash."""
    pins: list[Pin] = []
    for block in _blocks(text):
        head = block.partition("\\")[0].partition(" #")[0].strip()
        try:
            pins.append(Pin(Requirement(head), len(_HASH.findall(block)), block))
        except InvalidRequirement as error:
            raise ValueError(f"{head!r} is no pinned package: {error}") from error
    return pins


def problems_of(project: Mapping[str, object], file: LockFile, text: str) -> Iterator[str]:
    """Yields the problems of a lock file."""
    try:
        pins = pins_of(text)
    except ValueError as error:
        yield str(error)
        return
    for pin in pins:
        if not pin.version:
            yield f"{pin.requirement} is not held to one version"
        if not pin.num_hashes:
            yield f"{pin.requirement.name} has no hash"
    found = _FINGERPRINT.search(text)
    if found is None or found[1] != fingerprint(project, file.extras):
        yield "it was made for other requirements than pyproject.toml has now; make lock"
    yield from _missing(requirements_of(project, file.extras), pins, file.has_torch)


def _missing(asked: Sequence[str], pins: Sequence[Pin], has_torch: bool) -> Iterator[str]:
    versions: dict[str, list[str]] = {}
    for pin in pins:
        versions.setdefault(canonicalize_name(pin.requirement.name), []).append(pin.version)
    for text in asked:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if not has_torch and _NOT_ON_CPU.fullmatch(name):
            continue
        if not any(version in requirement.specifier for version in versions.get(name, ()) if version):
            yield f"pyproject.toml asks for {text}; the file has {versions.get(name, 'none')}"


def make(project: Mapping[str, object], file: LockFile) -> str:
    """Resolves a lock file's content. Raises CalledProcessError where uv finds no solution."""
    source = str(PYPROJECT) if file.extras else "-"
    words = ["uv", "pip", "compile", source, "--universal", "--python-version", _oldest_python(project)]
    words += ["--generate-hashes", "--no-header", "--no-emit-index-url", "--no-emit-find-links", "--quiet"]
    words += [word for extra in file.extras for word in ("--extra", extra)]
    words += ["--constraint", str(FOLDER / file.follows)] if file.follows else []
    done = subprocess.run(
        [sys.executable, "-m", *words],
        input="\n".join(requirements_of(project, file.extras)),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    pins = [pin for pin in pins_of(done.stdout) if file.has_torch or not _NOT_ON_CPU.fullmatch(pin.requirement.name)]
    head = [
        f"# Made by `make lock` of {_what(file)}.",
        f"# made for sha256:{fingerprint(project, file.extras)}",
    ]
    return "\n".join([*head, *(pin.text for pin in pins)]) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """Returns 1 if a lock file is wrong, or if there is no solution."""
    parser = argparse.ArgumentParser(prog="lock.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("make", "check"))
    parser.add_argument("files", nargs="*", help="of these names alone")
    options = parser.parse_args(words)
    project, num_problems = read_project(), 0
    files = [*lock_files(project), *image_files()]
    for file in [one for one in files if not options.files or one.name in options.files]:
        if options.what == "make":
            try:
                file.path.write_text(make(project, file))
            except subprocess.CalledProcessError as error:
                print(f"requirements/{file.name} cannot be made:\n{error.stderr}", file=sys.stderr)
                return 1
        text = file.path.read_text() if file.path.exists() else ""
        for problem in problems_of(project, file, text):
            print(f"requirements/{file.name}: {problem}", file=sys.stderr)
            num_problems += 1
        print(f"requirements/{file.name}: {len(pins_of(text))} packages for {_what(file)}")
    return 1 if num_problems else 0


def read_project() -> dict[str, object]:
    """Returns pyproject.toml's [project], with [build-system]'s requirements as `build-requires`."""
    document = tomllib.loads(PYPROJECT.read_text())
    return {**document["project"], "build-requires": document["build-system"]["requires"]}


def _what(file: LockFile) -> str:
    return f"the extras {', '.join(file.extras)}" if file.extras else "what builds the project"


def _blocks(text: str) -> Iterator[str]:
    """Yields each package's lines, without those before the first."""
    block: list[str] = []
    for line in text.splitlines():
        if line and not line[0].isspace() and not line.startswith("#"):
            if block:
                yield "\n".join(block)
            block = [line]
        elif block and line.strip():
            block.append(line)
    if block:
        yield "\n".join(block)


def _extras(project: Mapping[str, object]) -> Mapping[str, list[str]]:
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict), "pyproject.toml has a table of extras"
    return extras


def _texts(value: object) -> list[str]:
    assert isinstance(value, list), "pyproject.toml has a list of dependencies"
    return value


def _oldest_python(project: Mapping[str, object]) -> str:
    found = re.search(r">=\s*(\d+\.\d+)", str(project["requires-python"]))
    assert found is not None, "requires-python has a lower bound"
    return found[1]


if __name__ == "__main__":
    sys.exit(main())
