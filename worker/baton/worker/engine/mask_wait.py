"""Decides how long a step waits for the masks of constrained requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# Parts of a decode step; seconds if no other request could run.
_FREE_SHARE = 0.25
_OTHERS_SHARE = 0.03
_IDLE_SECONDS = 0.005
_MAX_STEP_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class MaskWait:
    """The requests that wait for masks, and the others."""

    step_seconds: float  # of a decode step; 0: unknown
    in_flight: bool  # the device computes a step, so waiting costs nothing
    others_can_run: bool  # other requests would wait, too
    advancing: bool  # masks are being computed; False: only grammars compile
    woken: bool  # the end of a compilation wakes the loop
    undrawn_seconds: float | None = None  # until the device has computed the step that these masks follow; None: none


def max_wait_seconds(wait: MaskWait) -> float:
    """Returns how many seconds the next step may be delayed."""
    if wait.in_flight or wait.others_can_run:
        if not wait.advancing:
            return 0.0
        step_seconds = min(wait.step_seconds, _MAX_STEP_SECONDS)
        seconds = step_seconds * (_FREE_SHARE if wait.in_flight else _OTHERS_SHARE)
        if wait.undrawn_seconds is None:
            return seconds
        return max(seconds, min(wait.undrawn_seconds, _MAX_STEP_SECONDS) + step_seconds * _OTHERS_SHARE)
    return _IDLE_SECONDS if wait.advancing or not wait.woken else 0.0
