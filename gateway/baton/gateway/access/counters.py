"""Counters of access control, and their Prometheus collector."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

MAX_TENANTS = 1000  # tenants with their own metrics, per process
OTHERS = "(others)"  # not a valid tenant name


@dataclass(slots=True)
class TenantUse:
    """Usage of one tenant at this gateway since the start."""

    requests: int = 0  # admitted requests
    running: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    limited: Counter[str] = field(default_factory=Counter)  # limited requests by limit


@dataclass(slots=True)
class AccessCounters:
    """Totals since the process started. Labels have fixed sets of values and never hold a client's text."""

    refused: Counter[str] = field(default_factory=Counter)  # refused requests by reason
    limited: Counter[str] = field(default_factory=Counter)  # limited requests by limit
    source_errors: int = 0  # failed reads of keys; the previous keys stay in force
    reloads: int = 0  # reads that changed keys or tenants
    redis_errors: Counter[str] = field(default_factory=Counter)  # errors of limit checks by kind
    redis_lost: int = 0  # tenants whose usage was lost in Redis and reported again
    local_decisions: int = 0  # limit checks decided by this gateway's share
    redis_up: bool = False
    tenants: dict[str, TenantUse] = field(default_factory=dict)  # by name

    def tenant(self, name: str) -> TenantUse:
        """Returns the usage of one configured tenant. Tenants beyond MAX_TENANTS share one entry."""
        use = self.tenants.get(name)
        if use is None:
            name = name if len(self.tenants) < MAX_TENANTS else OTHERS
            use = self.tenants.setdefault(name, TenantUse())
        return use


class AccessCollector(Collector):
    """Exports the counters to Prometheus."""

    def __init__(self, counters: AccessCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        own = self._counters
        yield _labelled(
            "baton_gateway_access_refused", "Requests without a valid key or the needed scope.", own.refused
        )
        yield _labelled("baton_gateway_limited", "Requests over a tenant's limit.", own.limited, "limit")
        yield _labelled(
            "baton_gateway_limits_redis_errors", "Limit checks that Redis did not decide.", own.redis_errors
        )
        for name, text, value in (
            ("key_source_errors", "Reads of keys that failed.", own.source_errors),
            ("key_reloads", "Reads of keys that changed them.", own.reloads),
            ("limits_redis_lost", "Times that a tenant's usage was missing from Redis.", own.redis_lost),
            ("limits_local_decisions", "Requests decided by this gateway's share of a limit.", own.local_decisions),
        ):
            yield CounterMetricFamily(f"baton_gateway_{name}", text, value=value)
        yield from self._tenants()
        yield GaugeMetricFamily(
            "baton_gateway_limits_redis_up", "1 while limits are decided in Redis.", value=own.redis_up
        )

    def _tenants(self) -> Iterable[Metric]:
        limited = CounterMetricFamily(
            "baton_gateway_tenant_limited", "A tenant's requests over its limits.", labels=("tenant", "limit")
        )
        running = GaugeMetricFamily("baton_gateway_tenant_running", "A tenant's running requests.", labels=("tenant",))
        counted = {
            name: CounterMetricFamily(f"baton_gateway_tenant_{name}", text, labels=("tenant",))
            for name, text in (
                ("requests", "A tenant's requests that were admitted."),
                ("input_tokens", "Prompt tokens of a tenant's requests that have ended."),
                ("output_tokens", "Output tokens of a tenant's requests that have ended."),
            )
        }
        for tenant, use in self._counters.tenants.items():
            running.add_metric((tenant,), use.running)
            for name, family in counted.items():
                family.add_metric((tenant,), getattr(use, name))
            for limit, count in use.limited.items():
                limited.add_metric((tenant, limit), count)
        yield from (*counted.values(), limited, running)


def _labelled(name: str, text: str, values: Counter[str], label: str = "reason") -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
