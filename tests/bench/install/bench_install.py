"""Measures `pip install` of Baton's wheel with all packages at hand, then `baton serve` to the first streamed token.

baton bench install [--extra serve] [--ways pip,no-compile,uv] [--rounds 1] [--packages FOLDER] [--each] [--json PATH]

This environment's pip first downloads the packages, with the torch of this environment (--torch), as it is configured
(PIP_EXTRA_INDEX_URL and so on); a FOLDER that has them is taken as it is. Each round has a new virtual environment, in
which the sample model is served twice: the first start compiles the modules that an installation left. --each installs
each package by itself instead. CPU seconds are those of all processes, user and system.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.install.environment import Environment, Spent, size_of
from support.processes.wheel_environment import build_wheel

from baton.services.bench.report import render_table, write_json
from baton.services.extras import DISTRIBUTION

WAYS: Mapping[str, Sequence[str]] = {"pip": (), "no-compile": ("--no-compile",), "uv": ()}


@dataclass(frozen=True)
class Round:
    """One installation and what followed it."""

    way: str
    install: Spent
    serve: Spent  # from the command to the first token
    again: Spent

    @property
    def together(self) -> float:
        """The seconds from `pip install` to the first token."""
        return self.install.seconds + self.serve.seconds


def main() -> int:
    """Measures, and prints the table. Returns an exit code."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="baton-install-") as name:
        folder = Path(name)
        packages = options.packages or folder / "packages"
        try:
            download(packages, options.extra, options.torch)
            if options.each:
                print(_table_of_each(folder, packages))
                return 0
            rounds = list(_rounds(folder, packages, options))
        except (subprocess.CalledProcessError, RuntimeError) as error:
            print(f"baton bench install: {_reason(error)}", file=sys.stderr)
            return 1
    print(f"{DISTRIBUTION}[{options.extra}], {options.torch}, Python {sys.version.split()[0]}, {os.cpu_count()} cores, "
          f"load {psutil.getloadavg()[0]:.1f}")  # fmt: skip
    print(_table(rounds))
    if options.json:
        write_json(options.json, {"extra": options.extra, "torch": options.torch, "rounds": [*map(asdict, rounds)]})
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", default="serve")
    parser.add_argument("--ways", type=_ways, default=["pip", "no-compile"], metavar=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--torch", default=f"torch=={metadata.version('torch')}", metavar="REQUIREMENT")
    parser.add_argument("--packages", type=Path, metavar="FOLDER")
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _ways(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in WAYS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(WAYS)}")
    return names


def download(folder: Path, extra: str, torch: str) -> None:
    """Builds the wheel into a folder, and downloads what it requires unless the folder has a torch."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{DISTRIBUTION.replace('-', '_')}-*.whl"):
        old.unlink()
    wheel = build_wheel(folder)
    if any(folder.glob("torch-*.whl")):
        return
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), f"{wheel}[{extra}]", torch]
    subprocess.run(words, check=True, capture_output=True, text=True)


def _rounds(folder: Path, packages: Path, options: argparse.Namespace) -> Iterator[Round]:
    requirement = f"{DISTRIBUTION}[{options.extra}]"
    if "uv" in options.ways:
        with Environment(folder / "cache") as environment:  # fills uv's cache
            environment.install("uv", packages, requirement)
    for number in range(options.rounds):
        for way in options.ways:
            with Environment(folder / f"{way}-{number}") as environment:
                install = environment.install("uv" if way == "uv" else "pip", packages, *WAYS[way], requirement)
                yield Round(way, install, environment.serve(), environment.serve())


def _table(rounds: Sequence[Round]) -> str:
    rows = []
    for one in rounds:
        parts = [text for part in (one.install, one.serve, one.again) for text in part.texts()]
        rows.append((one.way, *parts, f"{one.together:.1f}"))
    columns = ("seconds of", "install", "CPU", "serve", "CPU", "again", "CPU", "to a token")
    return render_table(columns, rows)


def _table_of_each(folder: Path, packages: Path) -> str:
    """Installs each wheel by itself, with and without compiling."""
    rows = []
    with Environment(folder / "compiled") as compiled, Environment(folder / "plain") as plain:
        for wheel in sorted(packages.glob("*.whl")):
            words = ("--no-deps", str(wheel))
            seconds = compiled.install("pip", packages, *words).seconds
            left_out = plain.install("pip", packages, "--no-compile", *words).seconds
            num_files, num_bytes = size_of(wheel)
            cells = (f"{num_files}", f"{num_bytes / 1e6:.1f}", f"{seconds:.2f}", f"{left_out:.2f}")
            rows.append((seconds, (wheel.name.partition("-")[0], *cells)))
    rows.sort(reverse=True)
    return render_table(("package", "files", "MB", "pip s", "no-compile s"), [row for _, row in rows])


def _reason(error: Exception) -> str:
    """Returns the last line that a failed program printed, or the error's own text."""
    lines = str(getattr(error, "stderr", "") or "").strip().splitlines()
    return lines[-1] if lines else str(error)


if __name__ == "__main__":
    sys.exit(main())
