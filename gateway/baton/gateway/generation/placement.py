"""The use of a placement, from submission to the outcome reported to the router."""

from __future__ import annotations

import time

from baton.gateway.routers.placer import Placed, Placer
from baton.gateway.tracing.request import GenerateSpan
from baton.v1 import router_pb2, worker_pb2


class PlacementUse:
    """A placement used by one or more choices; its outcome is reported when the last one has ended."""

    def __init__(self, router: Placer, placed: Placed, num_choices: int, span: GenerateSpan | None = None) -> None:
        self._router = router
        self._span = span
        self._placed = placed
        self._left = num_choices
        self._outcome = router_pb2.PlacementOutcome(placement_id=placed.response.placement_id)
        self._cached: list[int] = []
        self._longest = 0  # output tokens of the longest choice
        self.waits = True  # until the first token arrives
        self._first_at = 0.0  # monotonic seconds

    def signed(self, submit: worker_pb2.SubmitRequest) -> worker_pb2.SubmitRequest:
        """Returns the request with the span's trace context, if it is traced."""
        if self._span is not None:
            self._span.sign(submit)
        return submit

    def first_token(self) -> None:
        """Records the time of the first token of any choice."""
        self.waits = False
        self._first_at = time.monotonic()
        self._outcome.first_token_us = max(1, _us(self._first_at - self._placed.at))

    def finished(self, finish: worker_pb2.SlotFinish, num_output_tokens: int) -> None:
        """Records a choice's times after it ended normally. The last choice's times are reported."""
        decode_us = 0 if self.waits else _us(time.monotonic() - self._first_at)
        times = router_pb2.RequestTimes(
            place_us=_us(self._placed.at - self._placed.asked_at),
            queue_us=finish.queue_us,
            prefill_us=finish.prefill_us,
            transfer_us=finish.transfer_us,
            transfer_exposed_us=finish.transfer_exposed_us,
            num_transfer_bytes=finish.num_transfer_bytes,
            decode_us=decode_us,
            mean_itl_us=decode_us // (num_output_tokens - 1) if num_output_tokens > 1 else 0,
            num_preemptions=finish.num_preemptions,
        )
        self._outcome.times.CopyFrom(times)

    @property
    def predicted_cached_tokens(self) -> int:
        """Returns the number of cached tokens that the router expected."""
        return max(self._placed.response.decode_cached_tokens, self._placed.response.prefill_cached_tokens)

    def done(self, num_output_tokens: int, num_cached_tokens: int | None, worker_failed: bool) -> None:
        """Records the end of one choice; reports the outcome after the last one."""
        self._left -= 1
        self._outcome.num_output_tokens += num_output_tokens
        self._longest = max(self._longest, num_output_tokens)
        self._outcome.worker_failed |= worker_failed
        if num_cached_tokens is not None:
            self._cached.append(num_cached_tokens)
        if self._left == 0:
            # The other choices also reused blocks that the first one computed.
            self._outcome.num_cached_tokens = min(self._cached, default=0)
            self._router.report(self._placed, self._outcome, self._longest)
            if self._span is not None:
                self._span.end(self._outcome)


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
