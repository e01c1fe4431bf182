"""The order of test files: long ones first, and those that wait beside those that compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_COMPUTING = 2  # processes that compute beside one that waits


@dataclass(frozen=True, slots=True)
class SlowFile:
    """How long a file takes."""

    seconds: float
    waits: bool = False  # more than it computes


def read_slow_files(path: Path = ROOT / "tests" / "slow_files.txt") -> dict[Path, SlowFile]:
    """Returns the files that are listed. Raises ValueError where a file is listed that is not there."""
    files = {}
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        number, *marks, name = line.split()
        file = ROOT / name
        if not file.is_file():
            raise ValueError(f"{path.name} lists {name}, which is not there: rename it there too, or take it out")
        files[file] = SlowFile(float(number), "waits" in marks)
    return files


def in_turns(paths: Sequence[Path], files: Mapping[Path, SlowFile]) -> list[int]:
    """Returns the places of `paths`: listed files first, then the others as they come.

    Of the listed ones, those that wait take a third of the time of any beginning, so that the cores never idle in one
    part of a run and are short in another. Among either kind the longest come first; equal ones stay in order.
    """
    listed = sorted((path for path in dict.fromkeys(paths) if path in files), key=lambda path: -files[path].seconds)
    waiting = [path for path in listed if files[path].waits]
    computing = [path for path in listed if not files[path].waits]
    order: dict[Path, int] = {}
    waited = computed = 0.0
    while waiting or computing:
        if waiting and (not computing or waited * _COMPUTING <= computed):
            path = waiting.pop(0)
            waited += files[path].seconds
        else:
            path = computing.pop(0)
            computed += files[path].seconds
        order[path] = len(order)
    return sorted(range(len(paths)), key=lambda place: order.get(paths[place], len(order)))
