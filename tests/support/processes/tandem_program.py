"""`baton up` and `baton serve` as a user runs them: a program with an output and an exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
from support.processes.stack import ROOT, wait_until


class TandemProgram:
    """A running command that starts all services."""

    def __init__(self, tmp_path: Path, command: str, *flags: str, **environ: str) -> None:
        self.output_path = tmp_path / "output"
        self.tmp = tmp_path / "tmp"
        self.tmp.mkdir(exist_ok=True)
        words = [sys.executable, "-m", "baton.services.cli", command, *flags]
        variables = {**os.environ, "TMPDIR": str(self.tmp), **environ}
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT, env=variables
            )

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    def wait_ready(self) -> str:
        def ready():
            assert self.process.poll() is None, self.output
            return "Baton is ready" in self.output

        wait_until(ready, "ready", 60)
        return re.search(r"http://(\S+) \(REST\)", self.output)[1]

    def family(self) -> list[psutil.Process]:
        """Returns all of its descendants."""
        return psutil.Process(self.process.pid).children(recursive=True)
