"""What access control counts, for whoever exports it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

MAX_TENANTS = 1000  # with figures of their own, of one process
OTHERS = "(others)"  # no tenant can have this name


@dataclass(slots=True)
class TenantUse:
    """One tenant at this gateway, since it started."""

    requests: int = 0  # admitted
    running: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    limited: Counter[str] = field(default_factory=Counter)  # requests, by limit


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
    tenants: dict[str, TenantUse] = field(default_factory=dict)  # by name

    def tenant(self, name: str) -> TenantUse:
        """What one tenant has used. Names are of configured tenants; of too many, some share one."""
        use = self.tenants.get(name)
        if use is None:
            name = name if len(self.tenants) < MAX_TENANTS else OTHERS
            use = self.tenants.setdefault(name, TenantUse())
        return use


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
        yield from self._tenants()
        yield GaugeMetricFamily("baton_gateway_limits_redis_up", "Limits are decided in Redis.", value=own.redis_up)

    def _tenants(self) -> Iterable[Metric]:
        limited = CounterMetricFamily(
            "baton_gateway_tenant_limited", "A tenant's requests over its limits.", labels=("tenant", "limit")
        )
        running = GaugeMetricFamily("baton_gateway_tenant_running", "A tenant's requests that run.", labels=("tenant",))
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
