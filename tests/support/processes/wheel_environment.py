"""Python environments with Baton from its wheel: only with its requirements, or with all extras."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

from support.processes.stack import ROOT

from baton.services.extras import DISTRIBUTION, required_packages


def build_wheel(folder: Path) -> Path:
    """Builds the wheel of this checkout."""
    words = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    return wheel


class WheelEnvironment:
    """A virtual environment with the wheel unpacked. Other packages come from the environment of the tests."""

    def __init__(self, folder: Path, wheel: Path, *, extras: bool) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        (self._site,) = (folder / "lib").glob("python3*/site-packages")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self._site)
        if extras:
            # Python ignores .pth files in a path that comes from a .pth file, so editable installs are not included.
            lines = {str(Path(str(metadata.distribution(name).locate_file("")))) for name in ("grpcio", "torch")}
            (self._site / "packages.pth").write_text("\n".join(lines))
        else:
            for name in _closure():
                self._link(metadata.distribution(name))

    def _link(self, distribution: metadata.Distribution) -> None:
        for file in distribution.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target = self._site / file
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists():
                    target.symlink_to(Path(str(distribution.locate_file(file))))

    def baton(self, *words: str) -> list[str]:
        """Returns the command of Baton's CLI."""
        return [str(self.python), "-m", "baton.services.cli", *words]


def _closure() -> list[str]:
    """Returns the wheel's requirements without extras, including transitive ones."""
    found: list[str] = []
    waiting = required_packages(metadata.requires(DISTRIBUTION) or [], ())
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.append(name)
            waiting += required_packages(metadata.requires(name) or [], ())
    return found
