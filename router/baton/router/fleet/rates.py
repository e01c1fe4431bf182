"""The workers' speeds: their own measurements made robust, the fleet's medians, or a guess. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from baton.router.fleet.worker_view import Speeds, WorkerView
from baton.router.learning.step_model import StepModel, StepTimes, drawn_to_fleet, fleet_times
from baton.v1 import worker_pb2

# For a fleet that has not worked yet. Equal for all workers, they matter against each other only.
_PREFILL_TOKENS_PER_SECOND = 10_000.0
# A link is known once it was used: it is believed to be fast until then.
_TRANSFER_BYTES_PER_SECOND = 2e10
_RESTORE_BYTES_PER_SECOND = 1e10
_ADAPTER_LOAD_SECONDS = 0.5
_STEP = StepTimes(base=0.02, slope=0.0002)
_MEMORY = 5  # different values of a rate, of which the middle one is believed
_MAX_TRUST = 1000.0  # a rate this many times beyond the fleet's is a fault of the worker's clock


@dataclass(frozen=True, slots=True)
class Rates:
    """The speeds of one worker, every value measured or guessed."""

    prefill_tokens_per_second: float
    transfer_bytes_per_second: float
    step: StepTimes
    is_measured: bool  # prefill and step are measured by the worker or by another one of the fleet
    restore_bytes_per_second: float = _RESTORE_BYTES_PER_SECOND
    adapter_load_seconds: float = _ADAPTER_LOAD_SECONDS


GUESS = Rates(_PREFILL_TOKENS_PER_SECOND, _TRANSFER_BYTES_PER_SECOND, _STEP, False)


class RateModel:
    """Filters one worker's rates over its last states, so that a single outlier has no effect."""

    def __init__(self) -> None:
        self._steps = StepModel()
        self._values: dict[str, deque[float]] = {}
        self._middles: dict[str, float] = {}

    def observe(self, load: worker_pb2.WorkerLoad) -> None:
        """Takes a state of the worker."""
        # A stream waits a part of a step for each token if a step gives it several.
        seconds = load.decode_step_seconds / max(1.0, load.decode_tokens_per_step)
        self._steps.observe(load.num_running, seconds, load.num_context_tokens)
        self._keep("prefill", load.prefill_tokens_per_second)
        self._keep("transfer", load.transfer_bytes_per_second)
        self._keep("restore", load.restore_bytes_per_second)

    def speeds(self) -> Speeds:
        """Returns a view with filtered rates in place of the reported ones."""
        middles = self._middles
        return Speeds(
            middles.get("prefill", 0.0), middles.get("transfer", 0.0), middles.get("restore", 0.0), self._steps.times
        )

    def _keep(self, name: str, value: float) -> None:
        if not 0 < value < float("inf"):
            return
        values = self._values.get(name)
        if values is None:
            values = self._values[name] = deque(maxlen=_MEMORY)
        if not values or values[-1] != value:
            values.append(value)
            self._middles[name] = value if len(values) < 3 else median(values)


def rates_of(view: WorkerView, fallback: Rates) -> Rates:
    """Returns a worker's own rates, as far as it has measured them and they are plausible."""
    return Rates(
        _trusted(view.prefill_tokens_per_second, fallback.prefill_tokens_per_second),
        _trusted(view.transfer_bytes_per_second, fallback.transfer_bytes_per_second),
        drawn_to_fleet(view.step, fallback.step) if view.step is not None else fallback.step,
        bool(view.prefill_tokens_per_second and view.step),
        _trusted(view.restore_bytes_per_second, fallback.restore_bytes_per_second),
        view.adapter_load_seconds or fallback.adapter_load_seconds,
    )


def fleet_rates(views: Iterable[WorkerView]) -> Rates:
    """Returns the medians over the workers that have measured."""
    known = list(views)

    def middle(read: Callable[[WorkerView], float], default: float) -> float:
        values: Sequence[float] = [value for view in known if (value := read(view)) > 0]
        return median(values) if values else default

    step = fleet_times([view.step for view in known if view.step is not None])
    return Rates(
        middle(lambda view: view.prefill_tokens_per_second, _PREFILL_TOKENS_PER_SECOND),
        middle(lambda view: view.transfer_bytes_per_second, _TRANSFER_BYTES_PER_SECOND),
        step or _STEP,
        step is not None and any(view.prefill_tokens_per_second > 0 for view in known),
        middle(lambda view: view.restore_bytes_per_second, _RESTORE_BYTES_PER_SECOND),
        middle(lambda view: view.adapter_load_seconds, _ADAPTER_LOAD_SECONDS),
    )


def _trusted(own: float, fleet: float) -> float:
    if own <= 0:
        return fleet
    return min(max(own, fleet / _MAX_TRUST), fleet * _MAX_TRUST)
