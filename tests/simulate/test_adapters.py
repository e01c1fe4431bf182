"""A thousand adapters over eight simulated workers."""

from __future__ import annotations

from typing import Any

from support.fleet.simulate_harness import run, transcript

from baton.services.simulate.cluster.metrics import LatencyLimits
from baton.services.simulate.cluster.policy import AdapterBlindPolicy, BatonPolicy

SECONDS = 6.0
RATE = 100.0


def goodput(factory: Any, seed: int = 1) -> float:
    """Returns the good requests a second, after the first quarter."""
    simulation = run("adapters", RATE, SECONDS, seed, factory, roles=("both",) * 8)
    counted = [record for record in simulation.gateway.records if record.arrived >= SECONDS / 4]
    ended = [record for record in counted if record.finished >= 0 and not record.error]
    good = [record for record in ended if LatencyLimits().is_good(record)]
    return len(good) / (SECONDS * 3 / 4)


def test_goodput_is_higher_than_without_regard_to_adapters() -> None:
    aware, blind = goodput(BatonPolicy), goodput(AdapterBlindPolicy)
    print(f"goodput {aware:.1f}/s with regard to adapters, {blind:.1f}/s without: {aware / blind:.2f}x")
    assert aware >= 1.3 * blind


def test_equal_seeds_give_equal_runs() -> None:
    first, second = (run("adapters", 40.0, 2.0, roles=("both",) * 2) for _ in range(2))
    assert transcript(first) == transcript(second)
    assert all(record.finished > 0 and not record.error for record in first.gateway.records)
