"""The table's row on overload: runs the benchmark and reads its results."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from chaos.report import Row

_GOODPUT = 0.95
_REJECTION_MS = 5.0


def overload(options: argparse.Namespace) -> tuple[list[Row], str]:
    """Three times the capacity."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "overload.json"
        flags = ["--seed", str(options.seed), "--json", str(path)]
        command = [sys.executable, "-m", "baton.services.cli", "bench", "overload", *flags]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        last = json.loads(path.read_text())["loads"][-1]
    kept, told = last["of peak"], str(last["gateway p99"])  # "<= 5": the histogram's bound, in ms
    rejection = float(told.removeprefix("<= ")) if told != "-" else float("nan")
    factor = f"{last['load']:g}x"
    rows = [
        Row(f"overload at {factor}: goodput of its peak", f"{kept:.0%}", ">= 95 %", kept >= _GOODPUT),
        Row(f"overload at {factor}: refusals, p99, at the gateway", f"{told} ms", "5 ms", rejection <= _REJECTION_MS),
    ]
    return rows, text
