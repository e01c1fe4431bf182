"""Rates for workers that have not measured theirs: the fleet's, then a guess. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from baton.router.step_model import StepTimes
from baton.router.worker_view import WorkerView

# For a fleet that has not worked yet. Equal for all workers, they matter against each other only.
_PREFILL_TOKENS_PER_SECOND = 10_000.0
_TRANSFER_BYTES_PER_SECOND = 1e9
_STEP = StepTimes(base=0.02, slope=0.0002)


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast one worker is, every value known or guessed."""

    prefill_tokens_per_second: float
    transfer_bytes_per_second: float
    step: StepTimes
    is_measured: bool  # prefill and step are the worker's own


def rates_of(view: WorkerView, fallback: Rates) -> Rates:
    """A worker's own rates, where it knows them."""
    return Rates(
        view.prefill_tokens_per_second or fallback.prefill_tokens_per_second,
        view.transfer_bytes_per_second or fallback.transfer_bytes_per_second,
        view.step or fallback.step,
        bool(view.prefill_tokens_per_second and view.step),
    )


def fleet_rates(views: Iterable[WorkerView]) -> Rates:
    """The medians of those who know."""
    known = list(views)

    def middle(read: Callable[[WorkerView], float], default: float) -> float:
        values: Sequence[float] = [value for view in known if (value := read(view)) > 0]
        return median(values) if values else default

    steps = [view.step for view in known if view.step is not None]
    step = StepTimes(median(s.base for s in steps), median(s.slope for s in steps)) if steps else _STEP
    return Rates(
        middle(lambda view: view.prefill_tokens_per_second, _PREFILL_TOKENS_PER_SECOND),
        middle(lambda view: view.transfer_bytes_per_second, _TRANSFER_BYTES_PER_SECOND),
        step,
        False,
    )
