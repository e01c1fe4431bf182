"""Measures how sixteen concurrent attackers slow down another client, compared with programs that only use CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from attack.fleet import Attacked
from attack.stages import FirstToken, show_slowest
from attack.usage import percentile

_RATE = 5.0  # of the neighbour's requests, a second
_FLOOR_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Siege:
    """The p99 of a neighbour's first tokens, in seconds."""

    without: float
    floor: float  # beside programs that compute on every CPU, and send nothing
    attacked: float


def besiege(fleet: Attacked, numbers: Sequence[int], seconds: float, seed: int, slowest: int = 0) -> Siege:
    """Measures a client alone, beside programs that compute, and while attackers send the cases of these numbers.

    Ends the fleet's probe, whose requests are neither the neighbour's nor the attackers'. Prints the stages of so many
    of the slowest requests, if the fleet has a collector of spans.
    """
    fleet.probe.close()
    without = _first_tokens(fleet, "alone", seconds, seed)
    with _attackers("--compute"):
        floor = _first_tokens(fleet, "beside programs that compute", min(seconds, _FLOOR_SECONDS), seed)
    with _attackers(str(fleet.port), str(seed), *map(str, numbers), key=fleet.keys["attacker"]):
        attacked = _first_tokens(fleet, "attacked", seconds, seed)
    if slowest and fleet.collector is not None:
        for how, tokens in (("alone", without), ("attacked", attacked)):
            print(f"\nthe slowest, {how}:\n\n{show_slowest(tokens, fleet.collector, slowest)}", flush=True)
    return Siege(*(percentile([token.seconds for token in found], 0.99) for found in (without, floor, attacked)))


def _first_tokens(fleet: Attacked, how: str, seconds: float, seed: int) -> list[FirstToken]:
    program = Path(__file__).with_name("neighbours.py")
    words = [sys.executable, str(program), str(fleet.port), str(seconds), str(_RATE), str(seed)]
    done = subprocess.run(words, input=fleet.keys["neighbour"] + "\n", capture_output=True, text=True, check=True)
    found = [FirstToken(*times) for times in json.loads(done.stdout)]
    times = [token.seconds for token in found]
    shares = ", ".join(f"p{part * 100:g} {1000 * percentile(times, part):.0f}" for part in (0.5, 0.9, 0.99))
    print(f"a neighbour's first tokens, {how}: {len(found)}, {shares} ms\n{done.stderr}", end="", flush=True)
    return found


@contextmanager
def _attackers(*words: str, key: str = "") -> Iterator[None]:
    """Runs attackers.py with these arguments, in a session of its own."""
    program = Path(__file__).with_name("attackers.py")
    with subprocess.Popen(
        [sys.executable, str(program), *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(key + "\n")
        process.stdin.flush()
        if not process.stdout.readline():
            raise RuntimeError(f"{program.name} {words[0]} ended as it started")
        yield
        process.stdin.close()
