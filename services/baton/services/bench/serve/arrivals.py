"""When requests arrive: a gamma distribution around a rate, which may rise during a run."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

Ramp = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`burstiness` 1: Poisson; below: in bursts; above: evenly; inf: at equal distances."""

    burstiness: float = 1.0
    ramp: Ramp | None = None  # how the rate changes from `first` to `last` during the run
    first: float = 1.0  # requests a second
    last: float = 1.0

    def rate(self, steady: float, share: float) -> float:
        """Returns the rate when `share` of the run has passed."""
        share = min(1.0, share)
        if self.ramp == "linear":
            return self.first + (self.last - self.first) * share
        if self.ramp == "exponential":
            return float(self.first * (self.last / self.first) ** share)
        return steady

    def gap(self, steady: float, num_sent: int, num_requests: int | None, source: random.Random) -> float:
        """Returns the seconds until the next request."""
        share = 0.0 if not num_requests else num_sent / num_requests
        rate = self.rate(steady, share)
        if math.isinf(rate):
            return 0.0
        if math.isinf(self.burstiness):
            return 1 / rate
        return source.gammavariate(self.burstiness, 1 / (rate * self.burstiness))
