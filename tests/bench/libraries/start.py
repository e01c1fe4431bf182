"""Settings beside pydantic-settings, and terminal screens beside rich and textual: seconds of CPU of a new process.

`python tests/bench/libraries/start.py`; it needs pydantic-settings, rich and textual. Each line is the least of several
starts, less those of an empty Python.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys

_PYDANTIC = """
from typing import Literal
from pydantic import Field
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict
class Config(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="BATON_WORKER_", cli_parse_args=True)
{fields}
import sys
sys.argv = ["worker", "--field_3", "7"]
print(Config().field_3)
"""
_FIELDS = "".join(f'    field_{number}: int = Field(3, ge=0, le=100, description="A field.")\n' for number in range(80))
CASES = {
    "settings: baton, all fields of a worker": (
        "from baton.services.settings import load\nfrom baton.worker.config import WorkerConfig\n"
        "load('worker', (WorkerConfig,), ['--block-size', '32'], {}, '')"
    ),
    "settings: pydantic-settings, 80 fields": _PYDANTIC.format(fields=_FIELDS),
    "screens: baton, the chat": "import baton.services.chat.terminal",
    "screens: baton, tables of top": "import baton.services.top.screen, baton.services.top.table",
    "screens: rich": "import rich.live, rich.table, rich.markdown, rich.progress",
    "screens: textual": "import textual.app, textual.widgets",
}


def cpu_of(code: str) -> float:
    """Returns the CPU seconds of a Python that runs this code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=7)
    starts = parser.parse_args().starts
    empty = min(cpu_of("") for _ in range(starts))
    print(f"{os.cpu_count()} cores; an empty Python: {empty * 1000:.0f} ms")
    for name, code in CASES.items():
        try:
            print(f"{name:<45} {(min(cpu_of(code) for _ in range(starts)) - empty) * 1000:>5.0f} ms")
        except subprocess.CalledProcessError:
            print(f"{name:<45} not installed")


if __name__ == "__main__":
    main()
