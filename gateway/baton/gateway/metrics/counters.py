"""What the generation side counts, for whoever exports it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

ENDINGS = ("stop", "length", "tool_calls", "repetition", "abort", "error")


@dataclass(slots=True)
class GenerationCounters:
    """Totals since the process started."""

    placements: int = 0
    placement_retries: int = 0  # attempts that another router, or a later attempt, had to make good
    placement_failures: int = 0
    failovers: int = 0  # choices that moved to another worker
    lost_streams: int = 0  # worker streams that ended with requests on them
    silent_workers: int = 0  # of those, for want of a sign of life
    stalled_workers: int = 0  # that said of their device that it is stuck
    poisonous_requests: int = 0  # that were refused because their workers died
    protocol_errors: int = 0  # frames or tokens that could not be handled
    dropped_reports: int = 0  # outcomes that no router took
    # Choices by ENDINGS: their finish reason, "abort" where the client left, "error" where the request failed.
    finished_choices: Counter[str] = field(default_factory=Counter)
