"""A service's log while it starts: phases that ended, the progress of the one that runs, and the worker's report."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# As a worker logs them: `start: weights in 1.2 s`, `start: graphs, 4 of 20`, `weights: 1.2 of 3.4 GB, 0.85 GB/s`.
_PHASE = "start: "
_PROGRESS = (
    re.compile(r"start: (?P<phase>.+), (?P<amounts>(?P<done>\d+) of (?P<total>\d+))"),
    re.compile(r"(?P<phase>weights): (?P<amounts>(?P<done>[\d.]+) of (?P<total>[\d.]+) GB.*)"),
)
_REPORT = "this worker:"
_TEXT_LINE = re.compile(r"\d{4}-\S+ [A-Z]+ +\S+ \S+: (.*)")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a phase is."""

    phase: str
    part: float  # in [0, 1]
    amounts: str  # for people


class StartLog:
    """Follows the log file of a starting service."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.progress: Progress | None = None

    def read(self) -> list[str]:
        """Returns what ended or was reported since the last call, and keeps the progress of the running phase."""
        with self._path.open("rb") as log:
            log.seek(self._offset)
            data = log.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        said: list[str] = []
        for message in messages_of(whole.decode(errors="replace").splitlines()):
            if found := next((match for one in _PROGRESS if (match := one.fullmatch(message))), None):
                part = min(1.0, float(found["done"]) / max(float(found["total"]), 1e-9))
                self.progress = Progress(found["phase"], part, found["amounts"])
            elif message.startswith(_PHASE):
                self.progress = None
                said.append(message.removeprefix(_PHASE))
            elif message.startswith(_REPORT):
                said += message.splitlines()[1:]
        return said


def messages_of(lines: Sequence[str]) -> Iterator[str]:
    """Yields the messages of a log in either format. A message of several lines is one."""
    message: list[str] = []
    for line in lines:
        found = _TEXT_LINE.fullmatch(line)
        if found is None and not line.startswith("{"):
            message.append(line)  # goes on, or is none of ours
            continue
        if message:
            yield "\n".join(message)
        message = [found[1] if found else _json_message(line)]
    if message:
        yield "\n".join(message)


def _json_message(line: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError:
        return ""
    report = entry.get("report")
    if isinstance(report, dict):  # its text is left out of this format
        facts = [f"  {name:<20} {value}" for name, value in report.items() if isinstance(value, str | int | float)]
        return "\n".join([_REPORT, *facts])
    return str(entry.get("message", ""))
