"""What access control counts, for whoever exports it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(slots=True)
class AccessCounters:
    """Totals since the process started. Labels are of fixed sets, never a client's text."""

    refused: Counter[str] = field(default_factory=Counter)  # requests, by reason
    limited: Counter[str] = field(default_factory=Counter)  # requests, by limit
    source_errors: int = 0  # keys that could not be read again; the old ones stayed
    reloads: int = 0  # of keys and tenants
    redis_errors: Counter[str] = field(default_factory=Counter)  # of limits, by kind
    redis_lost: int = 0  # tenants whose use was gone from Redis, and told again
    local_decisions: int = 0  # limits that were enforced by this gateway's share
    redis_up: bool = False


class AccessCollector(Collector):
    """The counters for Prometheus."""

    def __init__(self, counters: AccessCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        own = self._counters
        yield _labelled("baton_gateway_access_refused", "Requests without a right to what they ask.", own.refused)
        yield _labelled("baton_gateway_limited", "Requests over a tenant's limit.", own.limited, "limit")
        yield _labelled("baton_gateway_limits_redis_errors", "Limits that Redis did not decide.", own.redis_errors)
        for name, text, value in (
            ("key_source_errors", "Reads of keys that failed.", own.source_errors),
            ("key_reloads", "Reads of keys that brought new ones.", own.reloads),
            ("limits_redis_lost", "Times that a tenant's use was gone from Redis.", own.redis_lost),
            ("limits_local_decisions", "Requests held to this gateway's share of a limit.", own.local_decisions),
        ):
            yield CounterMetricFamily(f"baton_gateway_{name}", text, value=value)
        yield GaugeMetricFamily("baton_gateway_limits_redis_up", "Limits are decided in Redis.", value=own.redis_up)


def _labelled(name: str, text: str, values: Counter[str], label: str = "reason") -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
