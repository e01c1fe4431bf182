"""The record of each request, and the statistics of a run: percentiles, throughput, goodput."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_GAP_SHARE = 0.99  # share of a request's gaps that must be within the limit


@dataclass(slots=True)
class Record:
    """One request as seen by its client. Times are in seconds of one clock."""

    due: float  # scheduled time
    sent: float = 0.0
    first: float | None = None  # token
    last: float = 0.0  # token
    ended: float = 0.0
    gaps: array[float] = field(default_factory=lambda: array("d"))  # between arrivals of tokens
    wanted_prompt: int = 0
    wanted_output: int = 0
    num_prompt: int = 0  # counted by the server
    num_cached: int = 0
    num_output: int = 0
    error: str = ""  # empty: the answer is complete

    def token(self, now: float) -> None:
        """Records the arrival of tokens."""
        if self.first is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now

    def close(self, now: float) -> None:
        """Records the end of the answer."""
        self.ended = now
        if not self.error and self.num_output < self.wanted_output:
            self.error = "ended early"

    @property
    def ttft(self) -> float:
        """Time to first token; to the end if no token had text."""
        return (self.ended if self.first is None else self.first) - self.sent

    @property
    def tpot(self) -> float:
        """Time per output token after the first."""
        return (self.last - self.first) / (self.num_output - 1) if self.first and self.num_output > 1 else 0.0

    def is_good(self, limits: Limits) -> bool:
        """Returns whether the request is complete and within the limits."""
        if self.error:
            return False
        if self.ttft > limits.ttft:
            return False
        return not self.gaps or percentile(sorted(self.gaps), _GAP_SHARE) <= limits.itl


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a good request in seconds. `itl` holds for 99 % of its gaps."""

    ttft: float = math.inf
    itl: float = math.inf


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of one figure over all requests or gaps, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    chosen: dict[str, float] = field(default_factory=dict)  # other percentiles by their names, such as p99.9

    @classmethod
    def of(cls, values: Sequence[float], percentiles: Sequence[float] = ()) -> Spread | None:
        """Returns the distribution of values; None without values. `percentiles`: those of `chosen`, in percent."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
        chosen = {f"p{one:g}": percentile(ordered, one / 100) for one in percentiles}
        return cls(math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1], chosen)


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of one level of load."""

    rate: float  # scheduled requests per second; inf: all at once
    concurrency: int | None  # maximum in flight
    seconds: float  # from the first request sent to the last end
    num_requests: int
    num_good: int
    errors: dict[str, int]
    num_inexact_prompts: int  # prompts whose length the server counted differently
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    lateness: Spread | None  # of the load generator itself, or of its concurrency limit
    cpu_share: float  # of one core, of the load generator
    schedule: str = ""  # of requests, in words, where neither rate nor concurrency is

    @property
    def num_whole(self) -> int:
        """Requests without an error."""
        return self.num_requests - sum(self.errors.values())

    @property
    def requests_per_second(self) -> float:
        """Complete requests per second."""
        return self.num_whole / self.seconds

    @property
    def goodput(self) -> float:
        """Good requests per second."""
        return self.num_good / self.seconds

    @property
    def output_tokens_per_second(self) -> float:
        """Output tokens per second of all requests."""
        return self.num_output_tokens / self.seconds


def percentile(ordered: Sequence[float], share: float) -> float:
    """Interpolates between the two nearest values of a sorted sequence."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarize(
    records: Sequence[Record],
    rate: float,
    concurrency: int | None,
    limits: Limits,
    cpu_seconds: float,
    percentiles: Sequence[float] = (),
) -> Summary:
    """Returns latencies of complete requests, and tokens of all requests."""
    whole = [record for record in records if not record.error]
    began = min(record.sent for record in records)
    seconds = max(max(record.ended for record in records) - began, 1e-9)
    return Summary(
        rate=rate,
        concurrency=concurrency,
        seconds=seconds,
        num_requests=len(records),
        num_good=sum(record.is_good(limits) for record in records),
        errors=dict(Counter(record.error for record in records if record.error)),
        num_inexact_prompts=sum(record.wanted_prompt not in (0, record.num_prompt) for record in whole),
        num_prompt_tokens=sum(record.num_prompt for record in records),
        num_cached_tokens=sum(record.num_cached for record in records),
        num_output_tokens=sum(record.num_output for record in records),
        ttft=Spread.of([record.ttft for record in whole], percentiles),
        itl=Spread.of([gap for record in whole for gap in record.gaps], percentiles),
        tpot=Spread.of([record.tpot for record in whole if record.num_output > 1], percentiles),
        e2e=Spread.of([record.ended - record.sent for record in whole], percentiles),
        lateness=Spread.of([record.sent - record.due for record in records]),
        cpu_share=cpu_seconds / seconds,
    )
