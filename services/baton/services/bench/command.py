"""`baton bench`: the benchmarks that users run, and the programs of tests/bench where there is a checkout."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.services import extras
from baton.services.checkout import CHECKOUT

# Those of the wheel: the package of each `command` module, and its summary.
_COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("serve.command", "Measures a running server under load: TTFT, ITL, TPOT, throughput, goodput."),
    "embed": ("embed.command", "Measures a running server that embeds texts: texts/s, tokens/s, latency."),
    "latency": ("offline.latency", "Measures how long one batch takes in this process, without a server."),
    "throughput": ("offline.throughput", "Measures requests and tokens a second in this process, without a server."),
    "startup": ("offline.startup", "Measures how long a new process takes to its first token."),
    "sweep": ("sweep.command", "Runs one of the others over a grid of its flags."),
}


def main(argv: Sequence[str], folder: Path = CHECKOUT / "tests" / "bench") -> int:
    """Lists the benchmarks, or runs the one named first with the arguments that follow."""
    programs = {_name(path): path for path in sorted(folder.rglob("bench_*.py"), key=_name)}
    if not argv or argv[0] in ("--help", "-h", "list"):
        print("usage: baton bench NAME [flags]\n")
        print("\n".join(f"  {name:<16} {summary}" for name, (_, summary) in _COMMANDS.items()))
        if programs:
            print("\nof the source checkout:\n")
            print("\n".join(f"  {name:<16} {_summary(path)}" for name, path in programs.items()))
        return 0
    name, rest = argv[0], argv[1:]
    if name in _COMMANDS:
        return _run(name, rest)
    if name in programs:
        return subprocess.run([sys.executable, str(programs[name]), *rest], check=False).returncode
    known = ", ".join((*_COMMANDS, *programs))
    others = "" if programs else "; the others are part of the source checkout"
    print(f"baton bench: unknown benchmark {name!r}; there are {known}{others}", file=sys.stderr)
    return 2


def _run(name: str, argv: Sequence[str]) -> int:
    try:
        code: int = importlib.import_module(f"baton.services.bench.{_COMMANDS[name][0]}").main(argv)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "baton"):
            raise
        print(f"baton bench {name}: {extras.advice(f'bench {name}', package)}", file=sys.stderr)
        return 1
    return code


def _name(path: Path) -> str:
    return path.stem.removeprefix("bench_")


def _summary(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]
