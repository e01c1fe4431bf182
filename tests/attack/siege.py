"""Sixteen clients that attack at once, and what it does to a neighbour."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from attack.case import Case
from attack.client import send
from attack.fleet import Attacked
from attack.usage import percentile

CLIENTS = 16
_RATE = 5.0  # of the neighbour's requests, a second
_NICE = 19  # attackers run on other machines: here they yield to the services


def _first_tokens(fleet: Attacked, seconds: float, seed: int) -> list[float]:
    program = Path(__file__).with_name("neighbours.py")
    words = [sys.executable, str(program), str(fleet.port), str(seconds), str(_RATE), str(seed)]
    done = subprocess.run(words, input=fleet.keys["neighbour"] + "\n", capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout)
    shares = ", ".join(f"p{part * 100:g} {1000 * percentile(found, part):.0f}" for part in (0.5, 0.9, 0.99))
    print(f"a neighbour's first tokens: {len(found)}, {shares} ms\n{done.stderr}", end="", flush=True)
    return found


def _attack(fleet: Attacked, cases: Sequence[Case], offset: int, stop: threading.Event) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    for index in itertools.count(offset):
        if stop.is_set():
            return
        send(fleet.port, fleet.keys["attacker"], cases[index % len(cases)], 60)


def besiege(fleet: Attacked, cases: Sequence[Case], seconds: float, seed: int) -> tuple[float, float]:
    """Returns the p99 of the neighbour's first tokens, without attackers and with them."""
    without = _first_tokens(fleet, seconds, seed)
    stop = threading.Event()
    step = max(1, len(cases) // CLIENTS)
    attackers = [
        threading.Thread(target=_attack, args=(fleet, cases, step * number, stop)) for number in range(CLIENTS)
    ]
    for one in attackers:
        one.start()
    try:
        attacked = _first_tokens(fleet, seconds, seed)
    finally:
        stop.set()
        for one in attackers:
            one.join()
    return percentile(without, 0.99), percentile(attacked, 0.99)
