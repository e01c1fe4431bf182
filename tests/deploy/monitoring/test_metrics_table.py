"""The table of metrics: true to the code, and to the names that vLLM's dashboards ask for."""

from __future__ import annotations

import re

from support.kubernetes.deploy_tools import ROOT

from baton.services import cli
from baton.services.tools.metrics_table import all_metrics, markdown

TABLE = ROOT / "deploy" / "metrics.md"

# What vLLM 0.26 exports, and its shipped dashboards and autoscalers ask for. What is not here is of what Baton has not:
# speculative decoding (spec_decode_*) and LoRA (lora_requests_info).
_STARRED = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "iteration_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "nixl_xfer_time_seconds",
    "nixl_bytes_transferred",
    "nixl_num_failed_transfers_total",
    "nixl_num_failed_notifications_total",
    "nixl_num_kv_expired_reqs_total",
    "kv_offload_load_bytes_total",
    "kv_offload_load_time_total",
    "kv_offload_store_bytes_total",
    "kv_offload_store_time_total",
]


def test_the_committed_table_matches_the_exported_metrics():
    assert TABLE.read_text().partition("\n\n")[2] == markdown(all_metrics()), "run `make metrics`"


def test_names_and_helps_are_in_form():
    for row in all_metrics():
        assert re.fullmatch(r"(baton_|vllm:|http_)[a-z0-9_]+", row.name)
        assert row.help.endswith(".")
        assert row.kind in ("counter", "gauge", "histogram")


def test_starred_names_of_vllm_are_there():
    exported = {row.name: row for row in all_metrics()}
    for name in _STARRED:
        assert exported[f"vllm:{name}"].labels[:2] == ("model_name", "engine")


def test_the_command_prints_a_line_for_each(capsys):
    assert cli.main(["metrics"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(all_metrics())
    assert any("baton_gateway_requests_total{route,status}" in line for line in printed)
