"""Python environments with Baton from its wheel and the packages that it requires with some extras."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Sequence
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.processes.service_process import ROOT

from baton.services.extras import DISTRIBUTION


def build_wheel(folder: Path) -> Path:
    """Builds the wheel of this checkout."""
    words = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob(f"{DISTRIBUTION.replace('-', '_')}-*.whl")
    return wheel


class WheelEnvironment:
    """A virtual environment with the wheel unpacked. Other packages are links to those of the tests' environment."""

    def __init__(self, folder: Path, wheel: Path, extras: Sequence[str] = ()) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        (self._site,) = (folder / "lib").glob("python3*/site-packages")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self._site)
        self.packages = _closure(_requirements_in(wheel), extras)
        for name in self.packages:
            self._link(metadata.distribution(name))

    def _link(self, distribution: metadata.Distribution) -> None:
        files = [file for file in distribution.files or () if ".." not in file.parts]
        folders = {file.parts[0] for file in files if file.parts[1:] == ("__init__.py",)}
        for file in [*folders, *(file for file in files if file.parts[0] not in folders)]:
            target = self._site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(Path(str(distribution.locate_file(file))))

    def baton(self, *words: str) -> list[str]:
        """Returns the command of Baton's CLI."""
        return [str(self.python), "-m", "baton.services.cli", *words]


def _requirements_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []


def _closure(requirements: Sequence[str], extras: Sequence[str]) -> list[str]:
    """Returns the wheel's requirements with these extras, including transitive ones."""
    found: dict[str, set[str]] = {}  # the extras of each package
    waiting = [*_needed(requirements, extras)]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name in found and found[name] >= one.extras:
            continue
        found.setdefault(name, set()).update(one.extras)
        own = requirements if name == DISTRIBUTION else metadata.requires(name) or []
        waiting += _needed(own, sorted(found[name]))
    return sorted(found.keys() - {DISTRIBUTION})


def _needed(requirements: Sequence[str], extras: Sequence[str]) -> Iterator[Requirement]:
    for one in map(Requirement, requirements):
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield one
