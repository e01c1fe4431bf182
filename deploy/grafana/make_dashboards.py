"""Writes the dashboards of this folder
(`make dashboards`). A panel is a title, a unit, and queries with their legends."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"

_COLUMNS = 24
_HEIGHT = 8
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. `queries`: expression and legend."""

    title: str
    unit: str  # as Grafana names it
    queries: tuple[tuple[str, str], ...]
    help: str = ""
    width: int = 8  # of 24 columns


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a dashboard: the values of a metric's label."""

    name: str
    metric: str
    label: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page. Rows are titled groups of panels."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    variables: tuple[Variable, ...] = ()


def rate(metric: str, by: str = "", where: str = "") -> str:
    """A counter's growth a second."""
    return f"sum{_by(by)} (rate({metric}{_where(where)}{_RATE}))"


def quantile(part: float, metric: str, by: str = "", where: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({part}, sum by ({labels}) (rate({metric}_bucket{_where(where)}{_RATE})))"


def quantiles(metric: str, where: str = "") -> tuple[tuple[str, str], ...]:
    """p50, p90 and p99, and the mean."""
    mean = f"sum(rate({metric}_sum{_where(where)}{_RATE})) / sum(rate({metric}_count{_where(where)}{_RATE}))"
    return (*((quantile(part, metric, where=where), f"p{part * 100:g}") for part in (0.5, 0.9, 0.99)), (mean, "mean"))


def ratio(part: str, whole: str, by: str = "", where: str = "") -> str:
    """One counter's growth over another's."""
    return f"{rate(part, by, where)} / {rate(whole, by, where)}"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


def _where(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


_MODEL = 'model_name=~"$model"'
_TENANT = 'tenant=~"$tenant"'
_MODELS = Variable("model", "baton_worker_kv_usage", "model_name")
_TENANTS = Variable("tenant", "baton_gateway_tenant_requests_total", "tenant")

FLEET = Dashboard(
    "baton-fleet",
    "Baton: fleet",
    (
        ("What clients see", (
            Panel("Requests", "reqps", ((rate("baton_gateway_requests_total", "status"), "{{status}}"),)),
            Panel("Time to first token", "s", quantiles("baton_gateway_ttft_seconds")),
            Panel("Between tokens", "s", quantiles("baton_gateway_itl_seconds")),
            Panel("In flight", "short", (("sum(baton_gateway_in_flight)", "generations"),
                                         ("sum(baton_gateway_connections)", "connections"))),
            Panel("Refused or failed", "reqps", ((rate("baton_gateway_rejected_total", "reason"), "{{reason}}"),
                                                 (rate("baton_gateway_aborted_total"), "client left"))),
            Panel("Failures that clients did not see", "ops", (
                (rate("baton_gateway_failovers_total"), "failovers"),
                (rate("baton_gateway_placement_retries_total"), "placements asked again"),
                (rate("baton_gateway_lost_worker_streams_total"), "streams to workers lost"))),
        )),
        ("Workers", (
            Panel("Tokens", "short", ((rate("baton_worker_output_tokens_total"), "written a second"),
                                      (rate("baton_worker_prompt_tokens_total"), "read a second"))),
            Panel("Running and waiting", "short", (("sum(baton_worker_running_requests)", "running"),
                                                   ("sum(baton_worker_queue_depth)", "waiting"))),
            Panel("KV in use", "percentunit", (("baton_worker_kv_usage", "{{instance}}"),)),
            Panel("Prompt tokens to compute", "short", (("baton_worker_pending_prefill_tokens", "{{instance}}"),)),
            Panel("A decode step", "s", (("baton_worker_decode_step_seconds", "{{instance}}"),)),
            Panel("Device busy", "percentunit", ((f"rate(baton_worker_step_seconds_total{_RATE})", "{{instance}}"),)),
        )),
        ("Batches", (
            Panel("Requests of batches", "reqps",
                ((rate("baton_gateway_batch_lines_total", "outcome"), "{{outcome}}"),)),
            Panel("Open batches and requests", "short", (
                ("max(baton_gateway_batches_open)", "batches that have not ended"),
                ("sum(baton_gateway_batch_lines_unrecorded)", "requests without a result"),
                ("sum(baton_gateway_batch_lines_running)", "requests in flight"),
                ("sum(baton_gateway_batch_lines_limit)", "allowed in flight"))),
            Panel("Bytes of files", "Bps", ((rate("baton_gateway_file_bytes_total", "source"), "{{source}}"),)),
        )),
        ("Services", (
            Panel("Workers by router", "short", (("baton_router_workers_alive", "alive, {{instance}}"),
                                                 ("baton_router_workers", "known, {{instance}}"))),
            Panel("Age of discovery", "s", (("baton_router_discovery_age_seconds", "{{list}}, {{instance}}"),)),
            Panel("Engines that answer", "short", (("sum(baton_worker_up)", "up"),
                                                   ("sum(baton_worker_draining)", "draining"))),
            Panel("Index and store", "short", (("baton_router_index_connected", "router {{instance}} to kvstore"),
                                               ("baton_kvstore_store_up", "kvstore {{instance}} has its store"))),
        )),
    ),
)  # fmt: skip

REQUESTS = Dashboard(
    "baton-requests",
    "Baton: one class of requests",
    (
        ("Route", (
            Panel("Requests by status", "reqps", (
                (rate("baton_gateway_requests_total", "status", 'route=~"$route"'), "{{status}}"),), width=12),
            Panel("Part that failed on our side", "percentunit", ((
                f'sum(rate(baton_gateway_requests_total{{route=~"$route",status=~"5.."}}{_RATE}) or vector(0)) / '
                + rate("baton_gateway_requests_total", where='route=~"$route"'), "5xx"),), width=12),
        )),
        ("Model", (
            Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds", _MODEL)),
            Panel("Between tokens", "s", quantiles("vllm:inter_token_latency_seconds", _MODEL)),
            Panel("Time per output token", "s", quantiles("vllm:request_time_per_output_token_seconds", _MODEL)),
            Panel("Whole answers", "s", quantiles("vllm:e2e_request_latency_seconds", _MODEL)),
            Panel("Prompt tokens", "short", quantiles("vllm:request_prompt_tokens", _MODEL)),
            Panel("Output tokens", "short", quantiles("vllm:request_generation_tokens", _MODEL)),
            Panel("Endings on workers", "reqps",
                ((rate("baton_worker_requests_total", "ending", _MODEL), "{{ending}}"),)),
            Panel("Prompt tokens found in caches", "percentunit", (
                (ratio("baton_worker_cached_tokens_total", "baton_worker_prompt_tokens_total", where=_MODEL),
                 "found"),)),
            Panel("Preemptions", "ops", ((rate("baton_worker_preemptions_total", where=_MODEL), "preempted"),)),
        )),
    ),
    (Variable("route", "baton_gateway_requests_total", "route"), _MODELS),
)  # fmt: skip

KV = Dashboard(
    "baton-kv",
    "Baton: KV and transfer",
    (
        ("Blocks", (
            Panel("Blocks by use", "short", ((f"sum by (use) (baton_worker_blocks{{{_MODEL}}})", "{{use}}"),)),
            Panel("Found in caches", "percentunit", (
                (ratio("baton_worker_cached_tokens_total", "baton_worker_prompt_tokens_total", "instance", _MODEL),
                 "{{instance}}"),)),
            Panel("Evictions and preemptions", "ops", (
                (rate("baton_worker_evicted_blocks_total", where=_MODEL), "blocks evicted"),
                (rate("baton_worker_preemptions_total", where=_MODEL), "requests preempted"))),
        )),
        ("Hand-over from prefill to decode", (
            Panel("Bytes moved", "Bps",
                ((rate("baton_kv_transfer_bytes_total", "direction", _MODEL), "{{direction}}"),)),
            Panel("Bandwidth while bytes move", "Bps", (
                (f"avg by (transport) (baton_kv_transfer_bytes_per_second{{{_MODEL}}} > 0)", "{{transport}}"),)),
            Panel("A transfer", "s", quantiles("baton_kv_transfer_seconds", _MODEL)),
            Panel("Exposed to the reader", "s", quantiles("baton_kv_transfer_exposed_seconds", _MODEL),
                  "From the first token to the last block: what the second token waits for."),
            Panel("Tail", "s", quantiles("baton_kv_transfer_tail_seconds", _MODEL)),
            Panel("Failures", "ops", (
                (rate("baton_kv_transfer_failed_total", "direction", _MODEL), "failed, {{direction}}"),
                (rate("baton_kv_transfer_expired_leases_total", where=_MODEL), "leases expired"),
                (rate("baton_kv_transfer_checksum_errors_total", where=_MODEL), "damaged"),
                (rate("baton_worker_local_fallbacks_total", where=_MODEL), "computed locally instead"))),
            Panel("Stranded blocks", "short",
                ((f"sum by (instance) (baton_kv_stranded_blocks{{{_MODEL}}})", "{{instance}}"),),
                  "Anything but 0 is a defect."),
        )),
        ("Host memory", (
            Panel("Blocks in host memory", "short", (
                (f"sum(baton_worker_cached_host_blocks{{{_MODEL}}})", "cached"),
                (f"sum(baton_worker_host_blocks{{{_MODEL}}})", "capacity"))),
            Panel("Copied", "Bps", (
                (rate("baton_worker_host_cache_offloaded_bytes_total", where=_MODEL), "to host memory"),
                (rate("baton_worker_host_cache_restored_bytes_total", where=_MODEL), "from host memory"))),
        )),
    ),
    (_MODELS,),
)  # fmt: skip

ROUTER = Dashboard(
    "baton-router",
    "Baton: router quality",
    (
        ("Placement", (
            Panel("Placements by prefill worker", "reqps",
                ((rate("baton_router_placements_total", "prefill"), "{{prefill}}"),)),
            Panel("Decision time", "s", quantiles("baton_router_place_seconds")),
            Panel("Refusals", "reqps", ((rate("baton_router_refusals_total", "code"), "{{code}}"),
                                        (rate("baton_router_failed_placements_total"), "worker failed"))),
            Panel("Without an outcome yet", "short", (("baton_router_in_flight", "{{instance}}"),)),
            Panel("Spread of load", "short", (
                ("max(baton_worker_running_requests)", "most"), ("avg(baton_worker_running_requests)", "mean"),
                ("min(baton_worker_running_requests)", "least"))),
        )),
        ("Index accuracy", (
            Panel("Cached tokens: predicted and found", "short", (
                (rate("baton_router_predicted_cached_tokens_total"), "predicted"),
                (rate("baton_router_actual_cached_tokens_total"), "found"),
                (rate("baton_router_phantom_cached_tokens_total"), "predicted, not found"))),
            Panel("Blocks in the index", "short", (("baton_router_index_blocks", "router {{instance}}"),
                                                   ("baton_kvstore_blocks", "kvstore {{instance}}"))),
            Panel("Repairs", "ops", (
                (rate("baton_router_index_resyncs_total"), "streams restarted after a gap"),
                (rate("baton_router_index_stale_blocks_total"), "entries dropped"),
                (rate("baton_kvstore_wanted_snapshots_total"), "snapshots requested"))),
            Panel("Store", "bytes", (("baton_kvstore_store_backlog_bytes", "waits for Redis, {{instance}}"),)),
            Panel("Block events", "ops", ((rate("baton_kvstore_block_events_total"), "applied"),)),
            Panel("Peer connections", "short", (("baton_router_peers", "routers, {{instance}}"),
                                              ("baton_kvstore_replicas", "kvstores, {{instance}}"),
                                              ("baton_kvstore_watchers", "watchers, {{instance}}"))),
        )),
    ),
)  # fmt: skip

TENANTS = Dashboard(
    "baton-tenants",
    "Baton: tenants",
    (
        ("Use", (
            Panel("Tokens", "short", (
                (rate("baton_gateway_prompt_tokens_total"), "prompt"),
                    (rate("baton_gateway_output_tokens_total"), "output"),
                (rate("baton_gateway_cached_tokens_total"), "prompt, cached"))),
            Panel("Over a limit", "reqps", ((rate("baton_gateway_limited_total", "limit"), "{{limit}}"),)),
            Panel("Without a right", "reqps", ((rate("baton_gateway_access_refused_total", "reason"), "{{reason}}"),)),
        )),
        ("By tenant", (
            Panel("Requests admitted", "reqps", (
                (rate("baton_gateway_tenant_requests_total", "tenant", _TENANT), "{{tenant}}"),)),
            Panel("Running", "short", (
                (f"sum by (tenant) (baton_gateway_tenant_running{{{_TENANT}}})", "{{tenant}}"),)),
            Panel("Over a limit", "reqps", (
                (rate("baton_gateway_tenant_limited_total", "tenant, limit", _TENANT), "{{tenant}}: {{limit}}"),)),
            Panel("Prompt tokens", "short", (
                (rate("baton_gateway_tenant_input_tokens_total", "tenant", _TENANT), "{{tenant}}"),), width=12),
            Panel("Output tokens", "short", (
                (rate("baton_gateway_tenant_output_tokens_total", "tenant", _TENANT), "{{tenant}}"),), width=12),
        )),
        ("Keys and limits", (
            Panel("Limits in Redis", "short", (("baton_gateway_limits_redis_up", "{{instance}}"),)),
            Panel("Decided without Redis", "ops", (
                (rate("baton_gateway_limits_local_decisions_total"), "by this gateway's share"),
                (rate("baton_gateway_limits_redis_errors_total"), "errors"),
                (rate("baton_gateway_limits_redis_lost_total"), "usage sent again"))),
            Panel("Keys", "ops", ((rate("baton_gateway_key_reloads_total"), "reloaded"),
                                  (rate("baton_gateway_key_source_errors_total"), "could not be read"))),
        )),
    ),
    (_TENANTS,),
)  # fmt: skip

DASHBOARDS = (FLEET, REQUESTS, KV, ROUTER, TENANTS)


def rendered(dashboard: Dashboard) -> dict[str, Any]:
    """A dashboard in Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in dashboard.rows:
        panels.append(_row(len(panels) + 1, title, y))
        x, y = 0, y + 1
        for panel in row:
            if x + panel.width > _COLUMNS:
                x, y = 0, y + _HEIGHT
            panels.append(_panel(len(panels) + 1, panel, x, y))
            x += panel.width
        y += _HEIGHT
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["baton"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "graphTooltip": 1,
        "templating": {"list": [_datasource(), *map(_variable, dashboard.variables)]},
        "panels": panels,
    }


def _row(number: int, title: str, y: int) -> dict[str, Any]:
    place = {"h": 1, "w": _COLUMNS, "x": 0, "y": y}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": _DATASOURCE, "expr": query, "legendFormat": legend}
        for index, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": _DATASOURCE,
        "gridPos": {"h": _HEIGHT, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.metric}, {variable.label})"
    return {
        "name": variable.name,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": "variable"},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def main() -> int:
    """Writes every file."""
    FOLDER.mkdir(exist_ok=True)
    for dashboard in DASHBOARDS:
        text = json.dumps(rendered(dashboard), indent=1) + "\n"
        (FOLDER / f"{dashboard.uid}.json").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
