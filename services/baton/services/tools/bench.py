"""`baton bench`: finds and runs the programs of tests/bench, where there is a checkout."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.services.checkout import CHECKOUT


def main(argv: Sequence[str], folder: Path = CHECKOUT / "tests" / "bench") -> int:
    """Lists the benchmarks, or runs the one named first with the arguments that follow."""
    programs = {_name(path): path for path in sorted(folder.rglob("bench_*.py"), key=_name)}
    asks_for_help = not argv or argv[0] in ("--help", "-h", "list")
    if asks_for_help:
        print("usage: baton bench NAME [flags]\n")
        print("\n".join(f"  {name:<16} {_summary(path)}" for name, path in programs.items()))
    if not programs:
        print(f"baton bench: no benchmarks in {folder}; they are part of the source checkout", file=sys.stderr)
        return 0 if asks_for_help and argv else 1
    if asks_for_help:
        return 0
    if argv[0] not in programs:
        print(f"baton bench: unknown benchmark {argv[0]!r}; there are {', '.join(programs)}", file=sys.stderr)
        return 2
    return subprocess.run([sys.executable, str(programs[argv[0]]), *argv[1:]], check=False).returncode


def _name(path: Path) -> str:
    return path.stem.removeprefix("bench_")


def _summary(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]
