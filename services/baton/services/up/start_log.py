"""A service's log while it starts: the phases that ended, and the progress of the one that runs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

# As a worker logs them: `start: weights in 1.2 s`, and `start: graphs, 4 of 20`.
_PREFIX = "start: "
_PROGRESS = re.compile(r"(?P<phase>.+), (?P<done>\d+) of (?P<total>\d+)")
_TEXT_LINE = re.compile(r"\S+ [A-Z]+ +\S+ \S+: (.*)")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a phase is."""

    phase: str
    done: int
    total: int


class StartLog:
    """Follows the log file of a starting service."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.progress: Progress | None = None

    def read(self) -> list[str]:
        """Returns the messages of phases that ended since the last call, and keeps the progress of the running one."""
        with self._path.open("rb") as log:
            log.seek(self._offset)
            data = log.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        ended = []
        for line in whole.decode(errors="replace").splitlines():
            message = message_of(line)
            if not message.startswith(_PREFIX):
                continue
            text = message.removeprefix(_PREFIX)
            if found := _PROGRESS.fullmatch(text):
                self.progress = Progress(found["phase"], int(found["done"]), int(found["total"]))
            else:
                self.progress = None
                ended.append(text)
        return ended


def message_of(line: str) -> str:
    """Returns the message in a line of either log format; empty if there is none."""
    if line.startswith("{"):
        try:
            return str(json.loads(line).get("message", ""))
        except (ValueError, AttributeError):
            return ""
    found = _TEXT_LINE.fullmatch(line)
    return found[1] if found else ""
