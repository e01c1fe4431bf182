"""How long a step may wait for the masks of constrained requests. A pure decision."""

from __future__ import annotations

from dataclasses import dataclass

# Shares of a decode step, and seconds where nobody else could run.
_FREE_SHARE = 0.25
_OTHERS_SHARE = 0.03
_IDLE_SECONDS = 0.005
_MAX_STEP_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class MaskWait:
    """What waits, and who else is there."""

    step_seconds: float  # of a decode step; 0: not known yet
    in_flight: bool  # the device computes a step: time is free
    others_can_run: bool  # their time it is
    advancing: bool  # masks are being made; False: only grammars compile
    woken: bool  # whoever sleeps is woken when a grammar is compiled


def max_wait_seconds(wait: MaskWait) -> float:
    """Seconds that the next step may be late."""
    if wait.in_flight or wait.others_can_run:
        share = _FREE_SHARE if wait.in_flight else _OTHERS_SHARE
        return min(wait.step_seconds, _MAX_STEP_SECONDS) * share if wait.advancing else 0.0
    return _IDLE_SECONDS if wait.advancing or not wait.woken else 0.0
