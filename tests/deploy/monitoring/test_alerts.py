"""Alerts fire and stay silent as they should, checked with promtool."""

from __future__ import annotations

import re
import subprocess

import yaml
from support.kubernetes.deploy_tools import ROOT, prometheus_tool

from baton.services.tools.metrics_table import all_metrics

RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
_RUNBOOK = ROOT / "deploy" / "README.md"
_AT = "30m"
_REQUESTS = 'baton_gateway_requests_total{instance="g",status="200",route="chat"}'
_ERRORS = 'baton_gateway_requests_total{instance="g",status="503",route="chat"}'
_TTFT = "baton_gateway_ttft_seconds_bucket"
_ITL = "baton_gateway_itl_seconds_bucket"
_RECEIVED = 'baton_kv_transfers_total{instance="w",direction="received"}'
_FAILED = 'baton_kv_transfer_failed_total{instance="w",direction="received"}'
_REFUSED = 'baton_router_refusals_total{instance="r",code="RESOURCE_EXHAUSTED"}'
_PLACED = 'baton_router_placements_total{instance="r",prefill="local"}'


def _slow(metric, seconds):
    """A histogram all of whose values lie within 1 s, or beyond."""
    within = "0+60x60" if seconds <= 1 else "0+0x60"
    return {f'{metric}{{le="1"}}': within, f'{metric}{{le="20"}}': "0+60x60", f'{metric}{{le="+Inf"}}': "0+60x60"}


# Alert: series for which it fires at 30 minutes, and series for which it does not.
_CASES = {
    "BatonDown": ({'up{job="baton",instance="w"}': "1 0x60"}, {'up{job="baton",instance="w"}': "1x60"}),
    "BatonNoWorkers": ({"baton_router_workers_alive": "0x60"}, {"baton_router_workers_alive": "0x10 2x60"}),
    "BatonWorkersMissing": (
        {"baton_router_workers": "3x60", "baton_router_workers_alive": "2x60"},
        {"baton_router_workers": "3x60", "baton_router_workers_alive": "3x60"},
    ),
    "BatonDiscoveryStale": (
        {'baton_router_discovery_age_seconds{instance="r",list="workers"}': "0+60x60"},
        # Between two bookmarks of an idle cluster, and once longer: a connection that was given up.
        {'baton_router_discovery_age_seconds{instance="r",list="workers"}': "0 60 0 62 0x25 130 0x30"},
    ),
    "BatonEngineSilent": ({'baton_worker_up{instance="w"}': "0x60"}, {'baton_worker_up{instance="w"}': "1x60"}),
    "BatonErrors": ({_REQUESTS: "0+60x60", _ERRORS: "0+6x60"}, {_REQUESTS: "0+6000x60", _ERRORS: "0+6x60"}),
    "BatonOverloaded": ({_REFUSED: "0+10x60", _PLACED: "0+60x60"}, {_REFUSED: "0+1x60", _PLACED: "0+60x60"}),
    "BatonSlowFirstToken": (_slow(_TTFT, 10), _slow(_TTFT, 1)),
    "BatonSlowTokens": (_slow(_ITL, 10), {**_slow(_ITL, 1), f'{_ITL}{{le="0.1"}}': "0+60x60"}),
    "BatonQueueing": ({"baton_worker_queue_depth": "40x60"}, {"baton_worker_queue_depth": "4x60"}),
    "BatonKvFull": ({"baton_worker_kv_usage": "0.99x60"}, {"baton_worker_kv_usage": "0.9x60"}),
    "BatonPreemptions": (
        {'baton_worker_preemptions_total{instance="w"}': "0+60x60"},
        {'baton_worker_preemptions_total{instance="w"}': "0+1x60"},
    ),
    "BatonFailedSteps": (
        {"baton_worker_failed_steps_total": "0x25 1x30"},
        {"baton_worker_failed_steps_total": "1x60"},
    ),
    "BatonTransfersFail": ({_RECEIVED: "0+60x60", _FAILED: "0+6x60"}, {_RECEIVED: "0+60x60", _FAILED: "0+1x60"}),
    "BatonStrandedBlocks": ({"baton_kv_stranded_blocks": "2x60"}, {"baton_kv_stranded_blocks": "0x60"}),
    "BatonDamagedTransfers": (
        {"baton_kv_transfer_checksum_errors_total": "0x10 1x50"},
        {"baton_kv_transfer_checksum_errors_total": "7x60"},
    ),
    "BatonPhantomHits": (
        {
            "baton_router_phantom_cached_tokens_total": "0+30x60",
            "baton_router_predicted_cached_tokens_total": "0+60x60",
        },
        {"baton_router_phantom_cached_tokens_total": "0+3x60", "baton_router_predicted_cached_tokens_total": "0+60x60"},
    ),
    "BatonIndexLost": ({"baton_router_index_connected": "0x60"}, {"baton_router_index_connected": "1x60"}),
    "BatonStoreLost": ({"baton_kvstore_store_up": "0x60"}, {"baton_kvstore_store_up": "1x60"}),
    "BatonLimitsWithoutRedis": (
        {"baton_gateway_limits_local_decisions_total": "0+1x60"},
        {"baton_gateway_limits_local_decisions_total": "5x60"},
    ),
    "BatonKeysUnreadable": (
        {"baton_gateway_key_source_errors_total": "0+1x60"},
        {"baton_gateway_key_source_errors_total": "5x60"},
    ),
    "BatonCertificateEnds": (
        {'baton_tls_certificate_expires_seconds{set="tls"}': "500000x60"},
        {'baton_tls_certificate_expires_seconds{set="tls"}': "5000000x60"},
    ),
    "BatonStrangers": (
        {'baton_rpc_refused_peers_total{instance="w"}': "0+1x60"},
        {'baton_kv_transfer_strangers_total{instance="w"}': "3x60"},
    ),
}


def test_rules_are_in_form():
    promtool = prometheus_tool("promtool")
    done = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_and_stays_quiet(tmp_path):
    promtool = prometheus_tool("promtool")
    assert set(_CASES) == set(_alerts())
    tests = [
        _unit_test(alert, series, fires)
        for alert, (firing, quiet) in _CASES.items()
        for series, fires in ((firing, 1), (quiet, 0))
    ]
    file = tmp_path / "alerts_test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_asks_for_metrics_that_exist():
    known = {series for row in all_metrics() for series in row.series} | {"up"}
    for alert, rule in _alerts().items():
        asked = set(re.findall(r"\b(?:baton_\w+|up\b)", rule["expr"]))
        assert asked, alert
        assert asked <= known, alert


def test_every_alert_has_an_entry_in_the_runbook_and_no_entry_is_left_over():
    entries = re.findall(r"^\| (Baton\w+) \|", _RUNBOOK.read_text(), re.MULTILINE)
    assert sorted(entries) == sorted(_alerts())


def _alerts():
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def _unit_test(alert, series, fires):
    query = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
    return {
        "name": f"{alert} {'fires' if fires else 'is quiet'}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": query, "eval_time": _AT, "exp_samples": [{"labels": "{}", "value": fires}]},
        ],
    }
