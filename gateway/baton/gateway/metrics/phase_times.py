"""Histograms of the phases of requests, as reported by workers; one observation per placement that ended normally."""

from __future__ import annotations

from baton.gateway.metrics.histogram import BucketCounts
from baton.v1 import router_pb2

_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))


class PhaseTimes:
    """The histograms of phases.

    A request that failed over is observed on its last worker; of several choices, the last one.
    """

    def __init__(self) -> None:
        self.queue = BucketCounts("baton_gateway_queue_seconds", "Submission to the worker's first step.", _SECONDS)
        self.prefill = BucketCounts("baton_gateway_prefill_seconds", "First step to first token.", _SECONDS)
        self.decode = BucketCounts("baton_gateway_decode_seconds", "First token to the end on the worker.", _SECONDS)
        self.inference = BucketCounts(
            "baton_gateway_inference_seconds", "First step to the end on the worker.", _SECONDS
        )
        self.longest = BucketCounts(
            "baton_gateway_longest_choice_tokens", "Output tokens of the longest choice.", _TOKENS
        )

    @property
    def all(self) -> tuple[BucketCounts, ...]:
        return self.queue, self.prefill, self.decode, self.inference, self.longest

    def observe(self, outcome: router_pb2.PlacementOutcome, longest: int) -> None:
        """Records a placement that has ended. `longest`: output tokens of its longest choice."""
        if outcome.worker_failed or not outcome.HasField("times"):
            return
        times = outcome.times
        self.queue.observe(times.queue_us / 1e6)
        self.prefill.observe(times.prefill_us / 1e6)
        self.decode.observe(times.decode_us / 1e6)
        self.inference.observe((times.prefill_us + times.decode_us) / 1e6)
        self.longest.observe(longest)
