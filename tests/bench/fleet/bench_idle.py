"""Measures the CPU and memory of every process of an idle tandem.

baton bench idle [--seconds 30] [--executor cpu|sim] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.processes.stack import Stack, start_stack


@dataclass(frozen=True)
class Usage:
    """The usage of one process in the interval."""

    service: str
    process: str
    cpu_percent: float  # of one core
    rss_mb: float
    switches_per_second: float


def main() -> None:
    """Starts a tandem, sends one request, waits, measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--executor", choices=("cpu", "sim"), default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as cleanup:
        stack = start_stack(Path(folder), cleanup, executor=options.executor)
        stack.chat("Tell me a story about a dog and a river.", max_tokens=16)
        time.sleep(3)
        rows = measure(stack, options.seconds)
    print(f"idle tandem, {options.executor} executor, {options.seconds:.0f} s, load {psutil.getloadavg()[0]:.1f}")
    print(f"{'service':<18} {'process':<14} {'CPU % of a core':>16} {'RSS MB':>8} {'switches/s':>11}")
    for row in rows:
        print(
            f"{row.service:<18} {row.process:<14} {row.cpu_percent:>16.2f} {row.rss_mb:>8.0f} "
            f"{row.switches_per_second:>11.0f}"
        )
    print(f"{'all':<33} {sum(row.cpu_percent for row in rows):>16.2f} {sum(row.rss_mb for row in rows):>8.0f}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def measure(stack: Stack, seconds: float) -> list[Usage]:
    """Returns the CPU time and voluntary wake-ups of every process of the stack in the interval."""
    processes = []
    for name, service in stack.services.items():
        assert service.process is not None
        leader = psutil.Process(service.process.pid)
        processes += [(name, one) for one in (leader, *leader.children(recursive=True))]
    before = [snapshot(one) for _, one in processes]
    began = time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    rows = []
    for (name, one), (cpu, switches) in zip(processes, before, strict=True):
        cpu_after, switches_after = snapshot(one)
        rows.append(
            Usage(
                service=name,
                process=one.name()[:14],
                cpu_percent=100 * (cpu_after - cpu) / elapsed,
                rss_mb=one.memory_info().rss / 1e6,
                switches_per_second=(switches_after - switches) / elapsed,
            )
        )
    return rows


def snapshot(process: psutil.Process) -> tuple[float, int]:
    """Returns the CPU seconds so far, and the voluntary context switches of all threads."""
    times = process.cpu_times()
    return times.user + times.system, process.num_ctx_switches().voluntary


if __name__ == "__main__":
    main()
