"""Sixteen clients that attack at once, in a process of their own, until its input ends.

python tests/attack/attackers.py PORT SEED NUMBER... < KEY
python tests/attack/attackers.py --compute    a loop on every CPU instead, which sends nothing

Attackers run on other machines: here they have the least share of the CPUs.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attack.cases.case import Case
from attack.cases.corpus import make_case
from attack.client import send

CLIENTS = 16
_NICE = 19
_AUTOGROUP = Path("/proc/self/autogroup")  # Linux shares CPUs between sessions by it; nice counts inside of one
_SECONDS = 60.0  # in which an answer comes


def yield_cpus() -> None:
    """Lets every other process of the machine go first."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    with contextlib.suppress(OSError):
        _AUTOGROUP.write_text(str(_NICE))


def _attack(port: int, key: str, cases: Sequence[Case], offset: int, stop: threading.Event) -> None:
    for index in itertools.count(offset):
        if stop.is_set():
            return
        with contextlib.suppress(OSError):
            send(port, key, cases[index % len(cases)], _SECONDS)


def _attack_all(port: int, seed: int, numbers: Sequence[int]) -> None:
    key = sys.stdin.readline().strip()
    cases = [make_case(seed, number) for number in numbers]
    stop = threading.Event()
    step = max(1, len(cases) // CLIENTS)
    attackers = [
        threading.Thread(target=_attack, args=(port, key, cases, step * number, stop)) for number in range(CLIENTS)
    ]
    for one in attackers:
        one.start()
    print("attacking", flush=True)
    sys.stdin.read()
    stop.set()
    for one in attackers:
        one.join()


def _loop() -> None:
    while True:
        pass


def _compute_on_all() -> None:
    loops = [multiprocessing.Process(target=_loop, daemon=True) for _ in range(os.cpu_count() or 1)]
    for one in loops:
        one.start()
    print("computing", flush=True)
    sys.stdin.read()
    for one in loops:
        one.kill()
        one.join()


def main(argv: Sequence[str]) -> None:
    """Attacks, or computes, until the input ends."""
    yield_cpus()
    if argv[0] == "--compute":
        _compute_on_all()
    else:
        _attack_all(int(argv[0]), int(argv[1]), [int(number) for number in argv[2:]])


if __name__ == "__main__":
    main(sys.argv[1:])
