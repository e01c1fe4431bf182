"""A worker's metrics under vLLM's names: labels, buckets, and what they are made of."""

from __future__ import annotations

from prometheus_client.core import Metric

from baton.v1 import control_pb2
from baton.worker.front.metrics.worker import metrics_of
from baton.worker.kv.residency import RESIDENCY_SECONDS, ResidencyTimes
from baton.worker.requests.histogram import BYTES, STEP_TOKENS, Histogram


def metrics(stats: control_pb2.GetStatsResponse) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics_of(stats, "m")}


def values(metric: Metric, label: str) -> dict[str, float]:
    return {sample.labels[label]: sample.value for sample in metric.samples}


def bounds(metric: Metric) -> list[float]:
    return [float(sample.labels["le"]) for sample in metric.samples if sample.name.endswith("_bucket")]


def test_prompt_tokens_are_divided_by_the_source_of_their_kv():
    counters = control_pb2.WorkerCounters(num_prompt_tokens=100, num_cached_tokens=40, num_transferred_tokens=25)
    counters.host_cache.num_hit_tokens = 10
    found = values(metrics(control_pb2.GetStatsResponse(counters=counters))["vllm:prompt_tokens_by_source"], "source")
    assert found == {"local_compute": 35, "local_cache_hit": 30, "external_kv_transfer": 35}


def test_waiting_requests_are_divided_by_reason():
    stats = control_pb2.GetStatsResponse(num_deferred=2)
    stats.state.load.queue_depth = 7
    assert values(metrics(stats)["vllm:num_requests_waiting_by_reason"], "reason") == {"capacity": 5, "deferred": 2}


def test_one_sleep_state_is_1():
    for level, state in enumerate(("awake", "weights_offloaded", "discard_all")):
        found = values(
            metrics(control_pb2.GetStatsResponse(sleep_level=level))["vllm:engine_sleep_state"], "sleep_state"
        )
        assert [name for name, value in found.items() if value] == [state]


def test_histograms_have_buckets_before_the_first_value():
    counters = control_pb2.WorkerCounters(
        step_tokens=Histogram(STEP_TOKENS).message(), kv_residency=ResidencyTimes().message()
    )
    counters.transfers.transfer_bytes.CopyFrom(Histogram(BYTES).message())
    found = metrics(control_pb2.GetStatsResponse(counters=counters))
    assert bounds(found["vllm:iteration_tokens_total"]) == [*STEP_TOKENS, float("inf")]
    assert bounds(found["vllm:nixl_bytes_transferred"])[:2] == [2.0**11, 2.0**13]
    assert bounds(found["vllm:kv_block_lifetime_seconds"]) == [*RESIDENCY_SECONDS, float("inf")]


def test_drafts_have_the_names_of_both_and_are_counted_by_position():
    counters = control_pb2.WorkerCounters(
        speculation=control_pb2.SpeculationCounters(
            num_drafts=4, num_draft_tokens=12, num_accepted_tokens=5, accepted_by_place=[3, 2, 0]
        )
    )
    found = metrics(control_pb2.GetStatsResponse(counters=counters))
    for name, value in (("drafts", 4), ("draft_tokens", 12), ("accepted_tokens", 5)):
        assert found[f"vllm:spec_decode_num_{name}"].samples[0].value == value
        assert found[f"baton_worker_{name}"].samples[0].value == value
    places = found["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert values(places, "position") == {"0": 3, "1": 2, "2": 0}


def test_estimated_costs_are_counters():
    counters = control_pb2.WorkerCounters(step_costs=control_pb2.StepCosts(flops=1e12, read_bytes=5, written_bytes=3))
    found = metrics(control_pb2.GetStatsResponse(counters=counters))
    names = ("estimated_flops_per_gpu", "estimated_read_bytes_per_gpu", "estimated_write_bytes_per_gpu")
    assert [found[f"vllm:{name}"].samples[0].value for name in names] == [1e12, 5, 3]
    assert found["vllm:estimated_flops_per_gpu"].samples[0].name == "vllm:estimated_flops_per_gpu_total"


def test_adapters_of_requests_are_labels_of_vllms_gauge():
    adapters = control_pb2.AdapterCounters(num_on_device=2, max_on_device=4, running=["a", "b"], waiting=["c"])
    counters = control_pb2.WorkerCounters(adapters=adapters)
    found = metrics(control_pb2.GetStatsResponse(counters=counters))
    (sample,) = found["vllm:lora_requests_info"].samples
    wanted = {"max_lora": "4", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert wanted.items() <= sample.labels.items()
    assert sample.value > 1.7e9
    assert found["baton_worker_adapters_on_device"].samples[0].value == 2
    without = metrics(control_pb2.GetStatsResponse())["vllm:lora_requests_info"]
    assert without.samples == [], "without --enable-lora"
