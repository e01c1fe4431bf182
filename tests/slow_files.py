"""The order of test files: the longest start first, so that none of them runs alone at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def read_slow_files(path: Path = ROOT / "tests" / "slow_files.txt") -> dict[Path, float]:
    """Returns the seconds that slow files take. Raises ValueError where a file is listed that is not there."""
    seconds = {}
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        number, name = line.split()
        file = ROOT / name
        if not file.is_file():
            raise ValueError(f"{path.name} lists {name}, which is not there: rename it there too, or take it out")
        seconds[file] = float(number)
    return seconds


def longest_first(paths: Sequence[Path], seconds: Mapping[Path, float]) -> list[int]:
    """Returns the places of `paths`, those of the longest files first; equal ones stay in order."""
    return sorted(range(len(paths)), key=lambda place: -seconds.get(paths[place], 0.0))
