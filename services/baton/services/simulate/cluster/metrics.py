"""The outcome of every request, and the figures computed from them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

LOST_SECONDS = 60.0


@dataclass(slots=True)
class Record:
    """One request. Times are seconds since the simulation's start; -1: never came."""

    arrived: float
    num_prompt_tokens: int
    num_output_tokens: int = 0
    first_token: float = -1.0
    finished: float = -1.0
    worker_id: str = ""
    prefill_worker_id: str = ""  # empty: prefilled where it decodes
    num_predicted_tokens: int = 0  # of the prompt, that the router took for cached
    num_cached_tokens: int = 0  # that were
    num_attempts: int = 0
    num_preemptions: int = 0
    error: str = ""  # status code of a request that failed

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first_token - self.arrived

    @property
    def tpot(self) -> float:
        """Mean seconds between tokens; 0 for fewer than two."""
        count = self.num_output_tokens - 1
        return (self.finished - self.first_token) / count if count > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """What a request must keep to count as good."""

    ttft: float = 1.0
    itl: float = 0.05  # mean of one request
    ttft_per_token: float = 0.0  # added to ttft for each prompt token

    def is_good(self, record: Record) -> bool:
        """Returns whether it finished within the limits. A refused or failed request is not good."""
        if record.finished < 0 or record.error:
            return False
        return record.ttft <= self.ttft + self.ttft_per_token * record.num_prompt_tokens and record.tpot <= self.itl


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run, of the requests that arrived after its warm-up."""

    policy: str
    workload: str
    num_workers: int
    load: float
    seed: int
    offered_per_second: float
    completed_per_second: float
    goodput_per_second: float
    good_share: float  # of the offered requests
    num_requests: int
    num_refused: int
    num_unfinished: int
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    latency_mean: float  # seconds to the last token; of a refused or unfinished request LOST_SECONDS
    itl_p50: float  # of requests' means
    itl_p99: float
    hit_rate: float  # cached prompt tokens over all
    predicted_error: float  # |predicted - found| cached tokens over prompt tokens
    remote_share: float  # prefilled by another worker
    output_tokens_per_second: float
    num_preemptions: int
    imbalance: float  # largest over mean of the workers' output tokens
    extra: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures for JSON."""
        return asdict(self)


def summarize(
    records: Sequence[Record],
    limits: LatencyLimits,
    start: float,
    end: float,
    *,
    policy: str,
    workload: str,
    num_workers: int,
    load: float,
    seed: int,
) -> Summary:
    """Computes the figures of the requests that arrived in [start, end)."""
    counted = [record for record in records if start <= record.arrived < end]
    done = [record for record in counted if record.finished >= 0 and not record.error]
    seconds = end - start
    num_good = sum(1 for record in done if limits.is_good(record))
    ttfts = [record.ttft for record in done]
    itls = [record.tpot for record in done if record.num_output_tokens > 1]
    prompt_tokens = sum(record.num_prompt_tokens for record in done) or 1
    by_worker: dict[str, int] = {}
    for record in done:
        by_worker[record.worker_id] = by_worker.get(record.worker_id, 0) + record.num_output_tokens
    return Summary(
        policy=policy,
        workload=workload,
        num_workers=num_workers,
        load=load,
        seed=seed,
        offered_per_second=len(counted) / seconds,
        completed_per_second=len(done) / seconds,
        goodput_per_second=num_good / seconds,
        good_share=num_good / len(counted) if counted else math.nan,
        num_requests=len(counted),
        num_refused=sum(1 for record in counted if record.error),
        num_unfinished=sum(1 for record in counted if record.finished < 0 and not record.error),
        ttft_p50=_quantile(ttfts, 0.5),
        ttft_p90=_quantile(ttfts, 0.9),
        ttft_p99=_quantile(ttfts, 0.99),
        latency_mean=_mean_latency(counted),
        itl_p50=_quantile(itls, 0.5),
        itl_p99=_quantile(itls, 0.99),
        hit_rate=sum(record.num_cached_tokens for record in done) / prompt_tokens,
        predicted_error=sum(abs(record.num_predicted_tokens - record.num_cached_tokens) for record in done)
        / prompt_tokens,
        remote_share=sum(1 for record in done if record.prefill_worker_id) / len(done) if done else 0.0,
        output_tokens_per_second=sum(record.num_output_tokens for record in done) / seconds,
        num_preemptions=sum(record.num_preemptions for record in done),
        imbalance=max(by_worker.values()) * num_workers / sum(by_worker.values()) if by_worker else math.nan,
    )


def _mean_latency(records: Sequence[Record]) -> float:
    if not records:
        return math.nan
    seconds = (LOST_SECONDS if one.finished < 0 or one.error else one.finished - one.arrived for one in records)
    return sum(seconds) / len(records)


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else math.nan
