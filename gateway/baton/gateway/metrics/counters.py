"""Counters of generations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.gateway.metrics.histogram import BucketCounts

TOKEN_BOUNDS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20)
ENDINGS = ("stop", "length", "tool_calls", "repetition", "abort", "error")


@dataclass(slots=True)
class GenerationCounters:
    """Totals since the process started."""

    placements: int = 0
    placement_retries: int = 0  # failed attempts that were repeated
    placement_failures: int = 0
    failovers: int = 0  # choices that moved to another worker
    lost_streams: int = 0  # worker streams that ended with running requests
    silent_workers: int = 0  # lost streams of silent workers
    stalled_workers: int = 0  # workers that reported a stalled device
    poisonous_requests: int = 0  # requests refused because their workers died
    protocol_errors: int = 0  # frames or tokens that could not be handled
    dropped_reports: int = 0  # outcomes that no router accepted
    # Choices by finish reason; "abort": the client disconnected, "error": the request failed.
    finished_choices: Counter[str] = field(default_factory=Counter)
    requested_choices: BucketCounts = field(
        default_factory=lambda: BucketCounts(
            "baton_gateway_requested_choices", "Choices that a request asks for.", _CHOICES
        )
    )
    requested_tokens: BucketCounts = field(
        default_factory=lambda: BucketCounts(
            "baton_gateway_requested_tokens", "Output tokens that a request allows each choice.", TOKEN_BOUNDS
        )
    )
